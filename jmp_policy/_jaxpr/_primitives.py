"""The facts that the package knows about JAX's primitives, in one table.

Other tables are expressions over it, such as `having(Fact.MOVES) - {"gather"}`. Decisions of one package, such as the
precisions of autocast, stay in that package.
"""

import enum


class Fact(enum.Enum):
    MOVES = "its outputs consist of elements of its inputs, in other places"
    KEEPS = "its output has every element of its input, and no others"
    CHOOSES = "picks among the elements of its inputs"
    ELEMENTWISE = "each output element is computed from the input elements in the same place"
    EXACT = "is exact in the dtype of its input"
    ADDS = "adds or subtracts two arrays"
    ANNOTATES = "returns its operands"
    TRANSFERS = "a collective that moves elements between devices, and combines none"
    DEVICE_SUMS = "a collective that sums over devices"
    DEVICE_CHOOSES = "a collective that takes a maximum or minimum over devices"
    CONTRACTS = "a matmul or convolution"
    SUMS = "sums over axes of one array"
    COMBINES = "has a jaxpr that combines two elements, but counts as one operation"
    OVERFLOWS = "may return infinity for finite operands, however small: a sum may have many terms"
    COMPARES = "returns booleans"
    INTEGERS = "computes with integers or booleans"
    BITS = "depends on the dtype that it was traced in"
    COMPLEX = "works on complex numbers"
    RANDOM = "makes random keys or bits"
    SPECIAL = "a special function, computed as a sum of many terms"
    DECOMPOSES = "linear algebra, which XLA does not have in half precision"
    CALLS = "runs a sub-jaxpr that the package looks into"
    OUTSIDE = "calls code that the package does not look into: callbacks, exported functions"
    KERNEL = "a kernel with fixed dtypes"
    MEMORY = "reads or writes a reference"
    ASYNC = "starts or ends an asynchronous transfer"
    TOKENS = "works on tokens, indices or shapes"


_F = Fact
_ROWS = {
    (_F.MOVES, _F.KEEPS): "reshape squeeze transpose rev broadcast_in_dim tile",
    (_F.MOVES, _F.KEEPS, _F.ELEMENTWISE): "copy",
    (_F.MOVES,): "slice dynamic_slice dynamic_update_slice gather pad concatenate split stack unstack",
    (_F.CHOOSES, _F.ELEMENTWISE): "max min clamp select_n",
    (_F.CHOOSES,): "sort top_k approx_top_k argmax argmin reduce_max reduce_min cummax cummin reduce_window_max"
    " reduce_window_min",
    (_F.CHOOSES, _F.COMBINES): "scatter scatter-max scatter-min",
    # JAX 0.12 dropped the ending `_p` of two names.
    (_F.ANNOTATES, _F.KEEPS, _F.ELEMENTWISE): "stop_gradient name optimization_barrier device_put sharding_constraint"
    " reshard relayout layout_constraint pvary vary_unreduced_cast vary_unreduced_cast_p reduced_vary_cast"
    " reduced_vary_cast_p preduced tie inspect_sharding",
    (_F.TRANSFERS,): "all_gather all_gather_invariant all_gather_reduced all_to_all ragged_all_to_all ppermute"
    " pbroadcast pbroadcast_dynamic",
    (_F.DEVICE_SUMS, _F.OVERFLOWS): "psum psum_invariant reduce_scatter unreduced_psum unreduced_reduce_scatter",
    (_F.DEVICE_CHOOSES,): "pmax pmin unreduced_pmax unreduced_pmin",
    (_F.ELEMENTWISE, _F.EXACT): "abs neg sign floor ceil round",
    (_F.ELEMENTWISE, _F.EXACT, _F.OVERFLOWS): "reduce_precision",
    (_F.ELEMENTWISE, _F.OVERFLOWS): "mul div integer_pow square pow exp exp2 expm1 sinh cosh convert_element_type",
    (_F.ELEMENTWISE, _F.OVERFLOWS, _F.ADDS): "add add_any sub",
    (_F.ELEMENTWISE,): "rem sqrt rsqrt cbrt log log1p log2 logistic tanh one_minus_square polynomial"
    " sin cos tan asin acos atan atan2 asinh acosh atanh erf erfc erf_inv",
    (_F.ELEMENTWISE, _F.SPECIAL): "digamma polygamma igamma igammac igamma_grad_a regularized_incomplete_beta zeta"
    " bessel_i0e bessel_i1e",
    (_F.ELEMENTWISE, _F.SPECIAL, _F.OVERFLOWS): "lgamma",
    (_F.CONTRACTS, _F.OVERFLOWS): "dot_general conv_general_dilated ragged_dot_general",
    (_F.CONTRACTS, _F.KERNEL): "scaled_dot",
    (_F.SUMS, _F.OVERFLOWS): "reduce_sum cumsum reduce_window_sum",
    (_F.OVERFLOWS,): "reduce_prod cumprod cumlogsumexp",
    (_F.COMBINES, _F.OVERFLOWS): "scatter-add scatter-mul select_and_scatter_add",
    (_F.COMBINES,): "reduce reduce_window scatter-sub select_and_scatter select_and_gather_add",
    (_F.COMPARES, _F.ELEMENTWISE): "eq ne lt le gt ge is_finite",
    (_F.COMPARES,): "eq_to lt_to le_to",
    (_F.INTEGERS, _F.ELEMENTWISE): "and or xor not shift_left shift_right_arithmetic shift_right_logical"
    " population_count clz mulhi",
    (_F.INTEGERS,): "reduce_and reduce_or reduce_xor lu_pivots_to_permutation",
    (_F.BITS, _F.ELEMENTWISE): "bitcast_convert_type nextafter",
    (_F.BITS,): "iota iota_2x32_shape zeros_like empty empty2 broadcast_to stage",
    (_F.COMPLEX, _F.ELEMENTWISE): "complex real imag conj",
    (): "fft",
    (_F.DECOMPOSES,): "cholesky cholesky_update eig eigh householder_product geqp3 geqrf hessenberg lu ormqr qr"
    " schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve",
    (_F.RANDOM,): "random_bits random_clone random_fold_in random_seed random_split random_unwrap random_wrap"
    " random_gamma rng_bit_generator rng_uniform threefry2x32 threefry4x32 philox2x32 philox4x32",
    (_F.CALLS,): "jit closed_call eval_jaxpr remat2 shard_map scan while cond custom_jvp_call custom_vjp_call",
    (_F.OUTSIDE,): "call call_exported call_hi_primitive call_hi_primitive_linearized composite linear_call custom_lin"
    " custom_linear_solve custom_partitioning custom_vmap_call custom_jvp_call_jaxpr remat_opt ffi_call pure_callback"
    " io_callback debug_callback debug_print check",
    (_F.KERNEL,): "scaled_matmul scaled_matmul_wrapper dot_product_attention_fwd dot_product_attention_fwd_wrapper"
    " dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd"
    " dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper"
    " cudnn_fusion pallas_call",
    (_F.MEMORY,): "get swap addupdate accum_grad_in_ref empty_ref new_ref free_ref freeze box_get box_set new_box"
    " new_log log_read log_extend run_state core_map pin unpin with_memory_space_constraint program_order",
    (_F.ASYNC,): "all_gather_start all_gather_done all_gather_reduced_start all_to_all_start all_to_all_done"
    " pbroadcast_start pbroadcast_done ppermute_start ppermute_done psum_start psum_done psum_invariant_start"
    " reduce_scatter_start reduce_scatter_done unreduced_psum_start unreduced_reduce_scatter_start psend precv",
    (_F.TOKENS,): "after_all create_token create_linear axis_index platform_index dim_as_value dimension_size"
    " shape_assertion dce_sink unreachable from_edtype to_edtype",
}  # fmt: skip

PRIMITIVES = {name: frozenset(facts) for facts, names in _ROWS.items() for name in names.split()}
"""The facts of each primitive, by name."""


def having(*facts: Fact) -> frozenset[str]:
    """Finds the primitives that have at least one of these facts."""
    return frozenset(name for name, known in PRIMITIVES.items() if not known.isdisjoint(facts))


CALLED: dict[str, str] = dict.fromkeys(("jit", "remat2", "shard_map"), "jaxpr")
CALLED |= dict.fromkeys(("closed_call", "eval_jaxpr"), "call_jaxpr")
"""The parameter with the jaxpr, for primitives that run one jaxpr once."""

CUSTOM = frozenset(("custom_jvp_call", "custom_vjp_call"))
"""Functions with a custom derivative, which the package enters only where it may."""

ENTERED = having(Fact.CALLS) - CUSTOM
"""Calls and control flow."""

MATMULS = having(Fact.CONTRACTS)
DEVICE_SUMS = having(Fact.DEVICE_SUMS)
