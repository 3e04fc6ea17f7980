"""Precision on a mesh: what moves between devices, in which dtype.

- `gather_params` gathers sharded parameters in the compute dtype of a policy, and has gradients reduced in its reduce
  dtype.
- `psum`, `pmean` and `psum_scatter` reduce in the reduce dtype of a policy, `all_gather` gathers in its compute dtype.
- `state_shardings` says where the state of an optimizer lies.
"""

from ._collectives import all_gather as all_gather, pmean as pmean, psum as psum, psum_scatter as psum_scatter
from ._gather_params import gather_params as gather_params
from ._state_shardings import state_shardings as state_shardings
