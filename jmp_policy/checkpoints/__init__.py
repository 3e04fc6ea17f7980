"""Converts checkpoints that were saved under one policy to states under another."""

from ._convert_state import convert_state as convert_state
