"""Rewrites a gradient jaxpr so that gradients are reduced over devices in a given dtype."""

from ._reduce_in import reduce_gradients_in as reduce_gradients_in
