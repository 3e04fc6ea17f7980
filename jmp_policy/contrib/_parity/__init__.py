"""`parity`: compares the log-probabilities of a trainer and a sampler, and finds the scopes that make them differ."""

from ._compare import parity as parity
from ._report import Parity as Parity
