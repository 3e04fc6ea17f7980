"""Where pickles of older versions look for the recipes of float8."""

from ._float8_format import CurrentScaling as CurrentScaling, DelayedScaling as DelayedScaling
