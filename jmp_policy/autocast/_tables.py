"""Which operation runs in which precision. The lists are data: check them against the sources that they name.

The classes are those of Micikevicius et al. (Mixed Precision Training, ICLR 2018), of torch.autocast's operator lists
and of TensorFlow grappler's auto_mixed_precision_lists; where they differ, the error against float64 decided.
"""

import enum


class Precision(enum.Enum):
    """What autocast does with an operation."""

    LOW = "inputs are cast to the compute dtype"
    FULL = "runs in float32, and so do the operations that follow its result, until the next low one"
    WIDE = "runs in float32, returns what its inputs were"
    INFER = "follows its inputs: float32 if one comes of a full operation, else low if one is low"
    CLEAR = "moves numbers, and computes nothing: as its inputs"
    COMPARE = "in the widest of its inputs, which is exact"
    TRACED = "as traced"


LOW = {
    "dot_general": "the matmul units that half precision is for",
    "conv_general_dilated": "the same",
    "ragged_dot": "the same, for mixtures of experts",
    "ragged_dot_general": "the same",
}

FULL = {
    "exp": "relative error of the result is the absolute error of the argument; overflows float16 at 11.1",
    "exp2": "as exp",
    "expm1": "as exp; cancels near 0",
    "log": "its argument's rounding is an absolute error of the result, and 0 may be rounding's",
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
    "lgamma": "special functions are sums of many terms",
    "digamma": "as lgamma",
    "polygamma": "as lgamma",
    "igamma": "as lgamma",
    "igammac": "as lgamma",
    "igamma_grad_a": "as lgamma",
    "random_gamma_grad": "as lgamma",
    "regularized_incomplete_beta": "as lgamma",
    "zeta": "as lgamma",
    "bessel_i0e": "as lgamma",
    "bessel_i1e": "as lgamma",
    "reduce_sum": "adds n numbers: an error of n/2 units in the last place in half",
    "reduce_prod": "multiplies n numbers, and over- or underflows",
    "cumsum": "as reduce_sum; bfloat16 alone: 4.5e-3 where float32 inside has 1.7e-3",
    "cumprod": "as reduce_prod; bfloat16 alone: 0.59 where float32 inside has 1.7e-3",
    "cumlogsumexp": "as exp and cumsum",
    "logistic_log": "as log",
    "fft": "a sum over all points, and XLA has none in half",
    "cholesky": "XLA has no linear algebra in half",
    "cholesky_update": "as cholesky",
    "eig": "as cholesky",
    "eigh": "as cholesky",
    "householder_product": "as cholesky",
    "geqrf": "as cholesky",
    "hessenberg": "as cholesky",
    "lu": "as cholesky",
    "lu_pivots_to_permutation": "as cholesky",
    "qr": "as cholesky",
    "schur": "as cholesky",
    "svd": "as cholesky",
    "symmetric_product": "as cholesky",
    "triangular_solve": "as cholesky",
    "tridiagonal": "as cholesky",
    "tridiagonal_solve": "as cholesky",
    "reduce": "a reduction with a function of the user's",
}

FULL_IN_FLOAT16 = {
    "square": "overflows at 256, and underflows below 2.4e-4",
    "integer_pow": "as square",
}
"""Full where the compute dtype has the exponent range of float16; low in bfloat16, which has that of float32."""

WIDE = {
    "scatter-add": "sums into one place from many; XLA adds in the dtype of the operand",
    "scatter_add": "as scatter-add",
    "scatter_mul": "as scatter-add, multiplying",
    "scatter-mul": "as scatter_mul",
    "scatter_sub": "as scatter-add",
    "scatter-sub": "as scatter-add",
    "scatter": "its program of updates is typed as it was traced",
    "scatter_min": "as scatter",
    "scatter-min": "as scatter",
    "scatter_max": "as scatter",
    "scatter-max": "as scatter",
    "reduce_window_sum": "the sum of average pooling",
    "reduce_window": "a windowed reduction with a function of the user's",
    "select_and_scatter_add": "the backward pass of max pooling adds where windows overlap",
    "select_and_gather_add": "packs pairs of float32",
    "select_and_scatter": "its programs are typed as they were traced",
}

INFER = {
    "add": "one rounding",
    "add_any": "one rounding",
    "sub": "one rounding",
    "mul": "one rounding",
    "div": "one rounding",
    "rem": "exact",
    "tanh": "about one unit in the last place",
    "logistic": "about one unit in the last place",
    "erf": "about one unit in the last place",
    "sqrt": "one rounding",
    "square": "one rounding, where it does not overflow",
    "integer_pow": "as square",
    "psum": "as in the dtype that the user reduces in",
    "psum2": "as psum",
    "psum_invariant": "as psum",
    "psum_scatter": "as psum",
    "reduce_scatter": "as psum",
    "unreduced_psum": "as psum",
    "unreduced_reduce_scatter": "as psum",
}

CLEAR = dict.fromkeys(
    [
        "abs", "neg", "sign", "max", "min", "clamp", "floor", "ceil", "round", "nextafter", "copy", "copy_p",
        "reshape", "squeeze", "expand_dims", "transpose", "rev", "slice", "dynamic_slice", "dynamic_update_slice",
        "gather", "pad", "concatenate", "split", "broadcast_in_dim", "select_n", "stop_gradient", "name",
        "reduce_max", "reduce_min", "cummax", "cummin", "reduce_window_max", "reduce_window_min", "top_k", "sort",
        "argmax", "argmin", "reduce_precision", "optimization_barrier", "all_gather", "all_gather_invariant",
        "all_gather_reduced", "all_to_all", "ppermute", "pbroadcast", "pmax", "pmin", "pvary", "pcast",
        "sharding_constraint", "reshard", "device_put", "mesh_cast", "tile", "layout_constraint", "preduced",
        "psend", "precv", "vary_unreduced_cast", "reduced_vary_cast",
    ],
    "moves or chooses numbers, and computes none",
)  # fmt: skip

COMPARE = dict.fromkeys(
    ["eq", "ne", "lt", "le", "gt", "ge", "is_finite", "eq_to", "lt_to", "le_to"], "returns a truth value"
)

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
whatever is inside: its squares do not overflow where its result does not."""
