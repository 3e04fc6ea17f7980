"""Gradients that are reduced over devices in a dtype of the user's: the rewriting of a gradient program."""

from ._reduce_in import reduce_gradients_in as reduce_gradients_in
