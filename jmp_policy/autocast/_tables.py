"""Tables of the precision of each operation.

The full dtype is float32, or float64 under a policy with it. The classes follow Micikevicius et al. (Mixed Precision
Training, ICLR 2018), torch.autocast's operator lists and TensorFlow grappler's auto_mixed_precision_lists. Where these
differ, the error against float64 decided.
"""

import enum
from collections.abc import Iterable

from .._jaxpr import Fact, having


class Precision(enum.Enum):
    __hash__ = object.__hash__  # members are looked up for each operation, and the hash of an `Enum` is slow

    LOW = "inputs are cast to the compute dtype"
    FULL = "runs in the full dtype, and so do the operations that follow, until the next low one"
    WIDE = "runs in the full dtype, and returns the dtype of its inputs"
    INFER = "follows its inputs by JAX's promotion: half precision with float32 is float32"
    CLEAR = "moves elements without computing, and follows its inputs likewise"
    COMPARE = "runs in the widest dtype of its inputs, which is exact"
    TRACED = "as traced"


def _give(reason: str, names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(sorted(names), reason)


def _qualify(package: str, names: str, end: str = "") -> list[str]:
    return [f"{package}.{name}{end}" for name in names.split()]


_NORMS = "LayerNorm RMSNorm GroupNorm InstanceNorm BatchNorm"


LOW = {
    "dot_general": "runs on the matmul units of accelerators",
    "conv_general_dilated": "the same",
    "ragged_dot_general": "the same, for mixtures of experts",
}

FULL = {
    "exp": "the relative error of the output is the absolute error of the input; overflows float16 at 11.1",
    "exp2": "as exp",
    "expm1": "as exp; cancels near 0",
    "log": "rounding the input is an absolute error of the output, and may make it 0",
    "log2": "as log",
    "log1p": "as log; 1 + x rounds to 1",
    "pow": "as exp of a logarithm",
    "rsqrt": "overflows float16 for sums of squares",
    "cbrt": "rare in activations",
    "sin": "rounding the input is an absolute error of an angle",
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
    "atan": "rare in activations",
    "erf_inv": "steep at the ends of its domain",
    "erfc": "in the tail, the relative error is that of exp",
    "polynomial": "adds and multiplies once per term",
    "reduce_sum": "adds n elements: an error of n/2 units in the last place in half precision",
    "reduce_prod": "multiplies n elements, and over- or underflows",
    "cumsum": "as reduce_sum; the error is 4.5e-3 in bfloat16, and 1.7e-3 with float32 inside",
    "cumprod": "as reduce_prod; the error is 0.59 in bfloat16, and 1.7e-3 with float32 inside",
    "cumlogsumexp": "as exp and cumsum",
    "scatter-add": "adds many elements to one; XLA adds in the dtype of the operand",
    "scatter-sub": "as scatter-add",
    "reduce_window_sum": "the sum of average pooling",
    "fft": "a sum over all points, and XLA does not have one in half precision",
    "reduce": "as reduce_sum, with a function of the user",
    **_give("special functions are sums of many terms", having(Fact.SPECIAL)),
    **_give("XLA does not have linear algebra in half precision", having(Fact.DECOMPOSES)),
}

FULL_IN_FLOAT16 = {
    "square": "overflows at 256, and underflows below 2.4e-4",
    "integer_pow": "as square",
}
"""Class full if the compute dtype is float16. In bfloat16, which has the range of float32, see `INFER`."""

FULL_BESIDE_FLOAT64 = {"custom_linear_solve": "the functions that it calls share one dtype"}
"""Class full if the policy or a rule has float64, which half precision does not: see `TRACED`."""

WIDE = {
    "scatter-mul": "multiplies many elements; XLA does so in the dtype of the operand",
    "reduce_window": "as reduce_window_sum, with a function of the user",
    "select_and_scatter_add": "the backward pass of max pooling adds where windows overlap",
    "select_and_gather_add": "packs pairs of float32",
    "select_and_scatter": "as select_and_scatter_add, with functions of the user",
}

INFER = {
    "add": "one rounding",
    "add_any": "one rounding",
    "sub": "one rounding",
    "mul": "one rounding",
    "div": "one rounding",
    "rem": "exact",
    "one_minus_square": "usually of a tanh: three roundings",
    "tanh": "about one unit in the last place",
    "logistic": "about one unit in the last place",
    "erf": "about one unit in the last place",
    "sqrt": "one rounding",
    "square": "one rounding, if it does not overflow",
    "integer_pow": "as square",
    "psum": "reduces in the dtype of the user's array",
    "psum_invariant": "as psum",
    "reduce_scatter": "as psum",
    "unreduced_psum": "as psum",
    "unreduced_reduce_scatter": "as psum",
}

SATURATING = {
    "logistic": "1 in bfloat16 from 6.2 on; float32 represents the difference to 1 up to 17",
    "tanh": "1 in bfloat16 from 3.5 on; float32 represents the difference to 1 up to 9",
    "erf": "as tanh",
}
"""Run in float32 if the output reaches a steep operation through moves, additions and multiplications only. The outputs
of `wide` and `narrow` functions stay in float32 under the same condition."""

STEEP = {
    "log": "infinite at 0, as in log(1 - sigmoid(x)) and log(softmax(x))",
    "log2": "as log",
    "log1p": "as log",
    "pow": "as log",
    "div": "steep in the denominator, as in 1 / (1 - sigmoid(x))",
    "sqrt": "infinite slope at 0, as in sqrt(1 - tanh(x)**2)",
    "rsqrt": "as sqrt",
    "asin": "steep at -1 and 1, where a tanh saturates",
    "acos": "as asin",
    "acosh": "steep at 1",
    "atanh": "as asin",
    "erf_inv": "as asin",
    "lgamma": "steep at 0",
    "digamma": "as lgamma",
    "regularized_incomplete_beta": "steep at 0 and 1",
}
"""Operations that are steep or infinite where a saturating operation saturates."""

KEEPING_SUMS = (
    _give("linear: keeps no residuals for the backward pass",
          (having(Fact.MOVES, Fact.ADDS) | {"neg", "select_n"}) - {"dynamic_update_slice"})
    | _give("picks among elements that rounding makes equal",
            having(Fact.CHOOSES) & {"argmax", "argmin", "reduce_max", "reduce_min", "sort", "top_k", "approx_top_k"})
    | _give("annotates a value, and returns it",
            {"stop_gradient", "optimization_barrier", "sharding_constraint", "layout_constraint"})
)  # fmt: skip
"""Operations of class infer or clear that take float32 matmul outputs uncast, under an accumulate dtype. Others take
them in the compute dtype: multiplications and `name` keep operands for the backward pass; collectives send them."""

CLEAR = (
    _give("moves elements", having(Fact.MOVES))
    | _give("picks among elements", having(Fact.CHOOSES))
    | _give("exact in half precision", having(Fact.EXACT))
    | _give("annotates a value, and returns it", having(Fact.ANNOTATES))
    | _give(
        "moves elements between devices: half as many bytes in half precision",
        having(Fact.TRANSFERS, Fact.DEVICE_CHOOSES),
    )
)

COMPARE = _give("returns booleans", having(Fact.COMPARES))

TRACED = (
    {"convert_element_type": "the user wrote this cast, and it is kept"}
    | _give("works on integers", having(Fact.INTEGERS))
    | _give("depends on the dtype that it was traced in", having(Fact.BITS))
    | _give("complex numbers have no half precision", having(Fact.COMPLEX))
    | _give("random keys and bits: autocast does not change the drawn elements", having(Fact.RANDOM))
    | _give("a kernel with fixed dtypes", having(Fact.KERNEL))
    | _give("reads and writes memory that has a dtype", having(Fact.MEMORY))
    | _give("start or end of a transfer: both need one dtype", having(Fact.ASYNC))
    | _give("the rewriter does not enter it", having(Fact.OUTSIDE))
    | _give("works on tokens, indices or shapes", having(Fact.TOKENS))
)
"""Run as traced, as do primitives without a row. Control flow, calls and custom derivatives need no rows, because the
rewriter enters them."""

ATTENTION = (
    "jax.nn.dot_product_attention",
    "flax.linen.dot_product_attention",
    "flax.linen.dot_product_attention_weights",
    "flax.nnx.dot_product_attention",
    "equinox.nn.MultiheadAttention.__call__",
    "haiku.MultiHeadAttention.__call__",
)
"""Functions whose matmuls of two activations a format with `attention=True` quantizes."""

FUNCTIONS = {
    **_give("wide", _qualify("jax.nn", "softmax standardize softplus elu celu selu squareplus")),
    **_give("full", _qualify("jax.nn", "log_softmax logsumexp log_sigmoid log1mexp logmeanexp")),
    "jax.nn.gelu": "infer",
    **_give("full", _qualify("jax.numpy", "linalg corrcoef cov poly polyfit polyval")),
    **_give(
        "infer", _qualify("jax.numpy.linalg", "cross diagonal matmul matrix_transpose multi_dot outer tensordot vecdot")
    ),
    "jax.scipy.linalg": "full",
    "jax.scipy.linalg.block_diag": "infer",
    "optax.losses": "full",
    **_give("wide", _qualify("flax.linen", f"{_NORMS} WeightNorm SpectralNorm", ".__call__")),
    **_give("wide", _qualify("flax.nnx", _NORMS, ".__call__")),
    **_give("narrow", ["flax.linen.Embed.__call__", "flax.nnx.Embed.__call__"]),
}
"""Functions that are treated as one operation. `full`: the full dtype inside and out. `wide`: the full dtype inside,
and out what came in, the compute dtype if an input is. `narrow`: the full dtype inside and compute dtype out. `infer`:
all operations inside follow their inputs."""
