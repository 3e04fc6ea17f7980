"""Moments of optimizers in 8 bits."""

import functools
import math
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._messages import describe
from .._trees import PyTree
from ._elementwise import describe_mixing, find_mixing
from ._moment_blocks import Blocks, Shape, choose_sides, dequantize, quantize, read_sides, scale_shape
from ._moment_chunks import Chunks, plan_chunks
from ._moment_codes import DYNAMIC, UNSIGNED_FLOAT, Code
from ._moments import MU, has_moments, roles_of
from ._step import Transformation, check_not_outermost, check_transformation, keep_dtypes, with_extra_args

_CODES = {MU: DYNAMIC, NU: UNSIGNED_FLOAT}
_EMBEDDING = re.compile(r".*embed.*|w[tp]e|tok_embeddings", re.IGNORECASE)
"""What tables of embeddings are called, as one name of a path."""

_CHUNKS = 128
"""How many chunks all quantized moments together are cut into; an update needs 8 to 12 bytes for each number of one."""
