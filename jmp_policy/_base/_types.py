"""Type variables of signatures."""

from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Loss = TypeVar("Loss")
Aux = TypeVar("Aux")
