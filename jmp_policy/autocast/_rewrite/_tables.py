"""Which operation runs in which precision. The lists are data: check them against the sources that they name.

The classes follow Micikevicius et al. (Mixed Precision Training, ICLR 2018), torch.autocast's operator lists
and TensorFlow grappler's auto_mixed_precision_lists; where they differ, the error against float64 decided.
"""

import enum
from collections.abc import Iterable

from ..._jaxpr import Fact, having


class Precision(enum.Enum):
    """What autocast does with an operation."""

    LOW = "inputs are cast to the compute dtype"
    FULL = "runs in float32, and so do the operations that follow its result, until the next low one"
    WIDE = "runs in float32, returns what its inputs were"
    INFER = "follows its inputs: float32 if one comes of a full operation, else low if one is low"
    CLEAR = "moves numbers, and computes nothing: as its inputs"
    COMPARE = "in the widest of its inputs, which is exact"
    TRACED = "as traced"


def _give(reason: str, names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(sorted(names), reason)


LOW = {
    "dot_general": "the matmul units that half precision is for",
    "conv_general_dilated": "the same",
    "ragged_dot_general": "the same, for mixtures of experts",
}

FULL = {
    "exp": "relative error of the result is the absolute error of the argument; overflows float16 at 11.1",
    "exp2": "as exp",
    "expm1": "as exp; cancels near 0",
    "log": "its argument's rounding is an absolute error of the result, and 0 may be rounding's",
    "log2": "as log",
    "log1p": "as log; 1 + x rounds to 1",
    "pow": "as exp of a logarithm",
    "rsqrt": "overflows float16 for sums of squares",
    "cbrt": "rarely of activations",
    "sin": "the argument's rounding is an absolute error of an angle",
    "cos": "as sin",
    "tan": "as sin",
    "asin": "steep at the ends of its domain",
    "acos": "as asin",
    "atan2": "a quotient that may overflow",
    "sinh": "as exp",
    "cosh": "as exp",
    "asinh": "as log",
    "acosh": "as log",
    "atanh": "as log",
    "atan": "rarely of activations",
    "erf_inv": "steep at the ends of its domain",
    "erfc": "relative error in the tail is exp's",
    "polynomial": "adds and multiplies as often as it has terms",
    "reduce_sum": "adds n numbers: an error of n/2 units in the last place in half",
    "reduce_prod": "multiplies n numbers, and over- or underflows",
    "cumsum": "as reduce_sum; bfloat16 alone: 4.5e-3 where float32 inside has 1.7e-3",
    "cumprod": "as reduce_prod; bfloat16 alone: 0.59 where float32 inside has 1.7e-3",
    "cumlogsumexp": "as exp and cumsum",
    "fft": "a sum over all points, and XLA has none in half",
    "reduce": "as reduce_sum, with a function of the user's",
    **_give("special functions are sums of many terms", having(Fact.SPECIAL)),
    **_give("XLA has no linear algebra in half", having(Fact.DECOMPOSES)),
}

FULL_IN_FLOAT16 = {
    "square": "overflows at 256, and underflows below 2.4e-4",
    "integer_pow": "as square",
}
"""Full where the compute dtype has the exponent range of float16; low in bfloat16, which has float32's range."""

WIDE = {
    "scatter-add": "sums into one place from many; XLA adds in the dtype of the operand",
    "scatter-mul": "as scatter-add, multiplying",
    "scatter-sub": "as scatter-add",
    "reduce_window_sum": "the sum of average pooling",
    "reduce_window": "as reduce_window_sum, with a function of the user's",
    "select_and_scatter_add": "the backward pass of max pooling adds where windows overlap",
    "select_and_gather_add": "packs pairs of float32",
    "select_and_scatter": "as select_and_scatter_add, with functions of the user's",
}

INFER = {
    "add": "one rounding",
    "add_any": "one rounding",
    "sub": "one rounding",
    "mul": "one rounding",
    "div": "one rounding",
    "rem": "exact",
    "one_minus_square": "of a tanh, mostly: three roundings",
    "tanh": "about one unit in the last place",
    "logistic": "about one unit in the last place",
    "erf": "about one unit in the last place",
    "sqrt": "one rounding",
    "square": "one rounding, where it does not overflow",
    "integer_pow": "as square",
    "psum": "as in the dtype that the user reduces in",
    "psum_invariant": "as psum",
    "reduce_scatter": "as psum",
    "unreduced_psum": "as psum",
    "unreduced_reduce_scatter": "as psum",
}

SATURATING = {
    "logistic": "1 in bfloat16 from 6.2 on, where float32 has what is missing up to 17",
    "tanh": "1 in bfloat16 from 3.5 on, where float32 has what is missing up to 9",
    "erf": "as tanh",
}
"""In float32 where their result reaches a steep operation through moves, sums and products only. The results of
`narrow` functions stay in float32 under the same condition."""

STEEP = {
    "log": "of what a sigmoid is short of 1, or a softmax of 0",
    "log2": "as log",
    "log1p": "as log",
    "pow": "as log",
    "div": "of the other side of a sigmoid, by what it is short of 1: steep in what it divides by",
    "sqrt": "of what the square of a tanh is short of 1: steep at 0",
    "rsqrt": "as sqrt",
    "asin": "steep at the ends of what a tanh is between",
    "acos": "as asin",
    "acosh": "steep at 1",
    "atanh": "as asin",
    "erf_inv": "as asin",
    "lgamma": "steep at 0",
    "digamma": "as lgamma",
    "regularized_incomplete_beta": "steep at 0 and 1",
}
"""What has a pole, or ends, where a saturating operation does."""

KEEPING_SUMS = (
    _give("linear: keeps nothing for the backward pass",
          (having(Fact.MOVES, Fact.ADDS) | {"neg", "select_n"}) - {"dynamic_update_slice"})
    | _give("picks among elements that rounding makes equal",
            having(Fact.CHOOSES) & {"argmax", "argmin", "reduce_max", "reduce_min", "sort", "top_k", "approx_top_k"})
    | _give("says something about a value, and leaves it",
            {"stop_gradient", "optimization_barrier", "sharding_constraint", "layout_constraint"})
)  # fmt: skip
"""What keeps the sums of products in float32, under a policy with an accumulate dtype, among what follows its inputs.
All else takes them in the compute dtype: what multiplies keeps its operands for the backward pass, `name` keeps them
because somebody said so, and collectives send them."""

CLEAR = (
    _give("moves elements", having(Fact.MOVES))
    | _give("picks among elements", having(Fact.CHOOSES))
    | _give("exact: its output for a half-precision number is one", having(Fact.EXACT))
    | _give("says something about a value, and leaves it", having(Fact.ANNOTATES))
    | _give("moves elements between devices: half as many bytes in half", having(Fact.TRANSFERS, Fact.DEVICE_CHOOSES))
)

COMPARE = _give("returns booleans", having(Fact.COMPARES))

TRACED = (
    {"convert_element_type": "the user wrote this cast, and it is kept"}
    | _give("of integers", having(Fact.INTEGERS))
    | _give("depends on the dtype that it was traced in", having(Fact.BITS))
    | _give("of complex numbers, which have no half precision", having(Fact.COMPLEX))
    | _give("of random keys and bits: autocast does not change which numbers are drawn", having(Fact.RANDOM))
    | _give("a kernel that takes the dtypes that it was given", having(Fact.KERNEL))
    | _give("reads and writes memory that has a dtype", having(Fact.MEMORY))
    | _give("one half of a transfer: both must agree on the dtype", having(Fact.ASYNC))
    | _give("a program of which the interpreter sees the outside only", having(Fact.OUTSIDE))
    | _give("of tokens, indices or shapes", having(Fact.TOKENS))
)
"""What runs as it was traced, as any primitive does that is in no table; control flow, calls and custom derivatives
need no rows, for the interpreter goes into them."""

FUNCTIONS = {
    "jax.nn.softmax": "narrow",
    "jax.nn.standardize": "narrow",
    "jax.nn.log_softmax": "full",
    "jax.nn.logsumexp": "full",
    "jax.nn.softplus": "narrow",
    "jax.nn.gelu": "infer",
    "jax.nn.elu": "narrow",
    "jax.nn.celu": "narrow",
    "jax.nn.selu": "narrow",
    "jax.nn.log_sigmoid": "full",
    "jax.nn.log1mexp": "full",
    "jax.nn.logmeanexp": "full",
    "jax.nn.squareplus": "narrow",
    "jax.numpy.linalg": "full",
    "jax.numpy.linalg.cross": "infer",
    "jax.numpy.linalg.diagonal": "infer",
    "jax.numpy.linalg.matmul": "infer",
    "jax.numpy.linalg.matrix_transpose": "infer",
    "jax.numpy.linalg.multi_dot": "infer",
    "jax.numpy.linalg.outer": "infer",
    "jax.numpy.linalg.tensordot": "infer",
    "jax.numpy.linalg.vecdot": "infer",
    "jax.scipy.linalg": "full",
    "jax.scipy.linalg.block_diag": "infer",
    "jax.numpy.corrcoef": "full",
    "jax.numpy.cov": "full",
    "jax.numpy.poly": "full",
    "jax.numpy.polyfit": "full",
    "jax.numpy.polyval": "full",
    "optax.losses": "full",
    "flax.linen.LayerNorm.__call__": "narrow",
    "flax.linen.RMSNorm.__call__": "narrow",
    "flax.linen.GroupNorm.__call__": "narrow",
    "flax.linen.InstanceNorm.__call__": "narrow",
    "flax.linen.BatchNorm.__call__": "narrow",
    "flax.linen.WeightNorm.__call__": "narrow",
    "flax.linen.SpectralNorm.__call__": "narrow",
    "flax.linen.Embed.__call__": "narrow",
    "flax.nnx.LayerNorm.__call__": "narrow",
    "flax.nnx.RMSNorm.__call__": "narrow",
    "flax.nnx.GroupNorm.__call__": "narrow",
    "flax.nnx.InstanceNorm.__call__": "narrow",
    "flax.nnx.BatchNorm.__call__": "narrow",
    "flax.nnx.Embed.__call__": "narrow",
}
"""Functions that are one operation to a reader. `full`: float32 inside, and out. `narrow`: float32 inside, and the
compute dtype out, unless a full operation's result went in. `infer`: as the operations that are exact enough in half,
whatever is inside."""
