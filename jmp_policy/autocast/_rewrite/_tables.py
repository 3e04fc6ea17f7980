"""Which operation runs in which precision. The lists are data: check them against the sources that they name.

The classes follow Micikevicius et al. (Mixed Precision Training, ICLR 2018), torch.autocast's operator lists
and TensorFlow grappler's auto_mixed_precision_lists; where they differ, the error against float64 decided.
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
    "lgamma": "special functions are sums of many terms",
    "digamma": "as lgamma",
    "polygamma": "as lgamma",
    "igamma": "as lgamma",
    "igammac": "as lgamma",
    "igamma_grad_a": "as lgamma",
    "regularized_incomplete_beta": "as lgamma",
    "zeta": "as lgamma",
    "bessel_i0e": "as lgamma",
    "bessel_i1e": "as lgamma",
    "reduce_sum": "adds n numbers: an error of n/2 units in the last place in half",
    "reduce_prod": "multiplies n numbers, and over- or underflows",
    "cumsum": "as reduce_sum; bfloat16 alone: 4.5e-3 where float32 inside has 1.7e-3",
    "cumprod": "as reduce_prod; bfloat16 alone: 0.59 where float32 inside has 1.7e-3",
    "cumlogsumexp": "as exp and cumsum",
    "fft": "a sum over all points, and XLA has none in half",
    "cholesky": "XLA has no linear algebra in half",
    "cholesky_update": "as cholesky",
    "eig": "as cholesky",
    "eigh": "as cholesky",
    "householder_product": "as cholesky",
    "geqp3": "as cholesky",
    "geqrf": "as cholesky",
    "hessenberg": "as cholesky",
    "lu": "as cholesky",
    "ormqr": "as cholesky",
    "qr": "as cholesky",
    "schur": "as cholesky",
    "svd": "as cholesky",
    "symmetric_product": "as cholesky",
    "triangular_solve": "as cholesky",
    "tridiagonal": "as cholesky",
    "tridiagonal_solve": "as cholesky",
    "reduce": "as reduce_sum, with a function of the user's",
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

KEEPING_SUMS = dict.fromkeys(
    ["add", "add_any", "sub", "neg", "select_n", "broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice",
     "dynamic_slice", "gather", "pad", "concatenate", "split", "stack", "unstack", "tile", "copy"],
    "linear: keeps nothing for the backward pass",
) | dict.fromkeys(
    ["argmax", "argmin", "reduce_max", "reduce_min", "sort", "top_k", "approx_top_k"],
    "chooses among numbers that rounding makes equal",
) | dict.fromkeys(
    ["stop_gradient", "optimization_barrier", "sharding_constraint", "layout_constraint"],
    "says something about a value, and leaves it",
)  # fmt: skip
"""What keeps the sums of products in float32, under a policy with an accumulate dtype, among what follows its inputs.
All else takes them in the compute dtype: what multiplies keeps its operands for the backward pass, `name` keeps them
because somebody said so, and collectives send them."""

CLEAR = (
    dict.fromkeys(
        ["reshape", "squeeze", "transpose", "rev", "slice", "dynamic_slice", "dynamic_update_slice", "gather", "pad",
         "concatenate", "split", "stack", "unstack", "broadcast_in_dim", "tile", "copy"],
        "moves numbers",
    )
    | dict.fromkeys(
        ["max", "min", "clamp", "select_n", "sort", "top_k", "approx_top_k", "argmax", "argmin", "reduce_max",
         "reduce_min", "cummax", "cummin", "reduce_window_max", "reduce_window_min", "scatter", "scatter-max",
         "scatter-min"],
        "chooses among numbers",
    )
    | dict.fromkeys(
        ["abs", "neg", "sign", "floor", "ceil", "round", "reduce_precision"],
        "exact: what it makes of a number of half precision is one",
    )
    | dict.fromkeys(
        ["stop_gradient", "name", "optimization_barrier", "device_put", "sharding_constraint", "reshard", "relayout",
         "layout_constraint", "pvary", "vary_unreduced_cast", "vary_unreduced_cast_p", "reduced_vary_cast",
         "reduced_vary_cast_p", "preduced", "tie", "inspect_sharding"],
        "says something about a value, and leaves it",
    )
    | dict.fromkeys(
        ["all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "ragged_all_to_all", "ppermute",
         "pbroadcast", "pbroadcast_dynamic", "pmax", "pmin", "unreduced_pmax", "unreduced_pmin"],
        "moves or chooses numbers between devices: half as many bytes in half",
    )
)  # fmt: skip

COMPARE = dict.fromkeys(
    ["eq", "ne", "lt", "le", "gt", "ge", "is_finite", "eq_to", "lt_to", "le_to"], "returns a truth value"
)

TRACED = (
    {"convert_element_type": "the user wrote this cast, and it is kept"}
    | dict.fromkeys(
        ["and", "or", "xor", "not", "reduce_and", "reduce_or", "reduce_xor", "shift_left", "shift_right_arithmetic",
         "shift_right_logical", "population_count", "clz", "mulhi", "lu_pivots_to_permutation"],
        "of integers",
    )
    | dict.fromkeys(
        ["bitcast_convert_type", "nextafter", "iota", "iota_2x32_shape", "zeros_like", "empty", "empty2",
         "broadcast_to", "stage"],
        "means the very dtype that it was traced in",
    )
    | dict.fromkeys(["complex", "real", "imag", "conj"], "of complex numbers, which have no half precision")
    | dict.fromkeys(
        ["random_bits", "random_clone", "random_fold_in", "random_seed", "random_split", "random_unwrap",
         "random_wrap", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32", "threefry4x32",
         "philox2x32", "philox4x32"],
        "of random keys and bits: autocast does not change which numbers are drawn",
    )
    | dict.fromkeys(
        ["scaled_dot", "scaled_matmul", "scaled_matmul_wrapper", "dot_product_attention_fwd",
         "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd", "dot_product_attention_bwd_wrapper",
         "dot_product_attention_fp8_fwd", "dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fp8_bwd",
         "dot_product_attention_fp8_bwd_wrapper", "cudnn_fusion"],
        "a kernel that takes the dtypes that it was given, and is in low precision already",
    )
    | dict.fromkeys(
        ["get", "swap", "addupdate", "accum_grad_in_ref", "empty_ref", "new_ref", "free_ref", "freeze", "box_get",
         "box_set", "new_box", "new_log", "log_read", "log_extend", "run_state", "core_map", "pin", "unpin",
         "with_memory_space_constraint", "program_order"],
        "reads and writes memory that has a dtype",
    )
    | dict.fromkeys(
        ["all_gather_start", "all_gather_done", "all_gather_reduced_start", "all_to_all_start", "all_to_all_done",
         "pbroadcast_start", "pbroadcast_done", "ppermute_start", "ppermute_done", "psum_start", "psum_done",
         "psum_invariant_start", "reduce_scatter_start", "reduce_scatter_done", "unreduced_psum_start",
         "unreduced_reduce_scatter_start", "psend", "precv"],
        "one half of a transfer: both must agree on the dtype",
    )
    | dict.fromkeys(
        ["call", "call_exported", "call_hi_primitive", "call_hi_primitive_linearized", "composite",
         "linear_call", "custom_lin", "custom_linear_solve", "custom_partitioning", "custom_vmap_call",
         "custom_jvp_call_jaxpr", "remat_opt", "ffi_call", "pure_callback", "io_callback", "debug_callback",
         "debug_print", "check"],
        "a program of which the interpreter sees the outside only",
    )
    | dict.fromkeys(
        ["after_all", "create_token", "create_linear", "axis_index", "platform_index", "dim_as_value",
         "dimension_size", "shape_assertion", "dce_sink", "unreachable", "from_edtype", "to_edtype"],
        "of tokens, indices, shapes and other things that are not numbers",
    )
)  # fmt: skip
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
