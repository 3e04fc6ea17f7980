"""Code shared by the two Flax adapters."""

from .._adapter import describe_written_dtypes as describe_written_dtypes, find_wider_dtype as find_wider_dtype
from .._call_casts import keep_wide_results as keep_wide_results, read_wide as read_wide, round_result as round_result
from ._made_classes import (
    find_by_name as find_by_name,
    make_subclass as make_subclass,
    pickle_by_recipe as pickle_by_recipe,
)
from ._observation import Observation as Observation, eval_shapes as eval_shapes, read_path as read_path
