"""Precision on a mesh: what moves between devices, in which dtype.

- `psum`, `pmean` and `psum_scatter` reduce in the reduce dtype of a policy, `all_gather` gathers in its compute dtype.
- `state_shardings` says where the state of an optimizer lies.
"""

from ._collectives import all_gather as all_gather, pmean as pmean, psum as psum, psum_scatter as psum_scatter
from ._state_shardings import state_shardings as state_shardings
