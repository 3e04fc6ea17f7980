"""Collectives between devices, read from a jaxpr or from the output of XLA's partitioner."""

from ._collective import Collective as Collective
from ._collectives import collectives as collectives
from ._report import Collectives as Collectives
