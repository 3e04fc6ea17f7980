"""Mixed precision on a mesh: the dtypes of values that move between devices.

- `gather_params` gathers sharded parameters in the compute dtype of a policy, and reduces gradients in its reduce
  dtype.
- `psum`, `pmean` and `psum_scatter` reduce in the reduce dtype of a policy; `all_gather` gathers in its compute dtype.
- `state_shardings` returns the shardings of the state of an optimizer.
"""

from ._collectives import all_gather as all_gather, pmean as pmean, psum as psum, psum_scatter as psum_scatter
from ._gather_params import gather_params as gather_params
from ._state_shardings import state_shardings as state_shardings
