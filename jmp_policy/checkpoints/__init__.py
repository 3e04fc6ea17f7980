"""From a checkpoint that was saved under one policy to a state that trains under another."""

from ._convert_state import convert_state as convert_state
