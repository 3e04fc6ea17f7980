"""Collectives between devices, read from a jaxpr or from the output of XLA's partitioner."""

from ._collectives import collectives as collectives
from ._report import Collective as Collective, Collectives as Collectives
