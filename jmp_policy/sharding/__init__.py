"""Precision on a mesh: what moves between devices, in which dtype.

- `psum`, `pmean` and `psum_scatter` reduce in the reduce dtype of a policy, `all_gather` gathers in its compute dtype.
"""

from ._collectives import all_gather as all_gather, pmean as pmean, psum as psum, psum_scatter as psum_scatter
