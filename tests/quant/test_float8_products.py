"""Products in 8-bit floating point, forward and backward, against NumPy's in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_reference import (
    TWO_AXES,
    UNIT,
    computed,
    contraction,
    convolution,
    doubt,
    fresh_state,
    rolled,
    rounded,
    scale_from,
)

from jmp_policy.quant import CurrentScaling, DelayedScaling, Float8, dot_general, einsum

Float8 = functools.partial(Float8, amax_history_length=3, min_size=0)
FORMATS = {
    "current": Float8(CurrentScaling()),
    "current, with a margin": Float8(CurrentScaling(), margin=2),
    "row": Float8(CurrentScaling("row")),
    "row, but for the weight": Float8(CurrentScaling("row"), weight_grad=False),
    "delayed": Float8(),
    "delayed, but for the weight": Float8(weight_grad=False),
    "most recent": Float8(DelayedScaling("most_recent"), margin=1),
    "delayed by two": Float8(DelayedScaling(delay=2)),
    "most recent, delayed by two": Float8(DelayedScaling("most_recent", delay=2)),
}
LENGTHS = {"a": 2, "b": 3, "k": 4, "l": 8, "m": 16, "n": 16, "h": 8}
CASES = {
    "a batch and axes in odd orders": contraction(
        "kbml,lbnk->bmn", LENGTHS, functools.partial(dot_general, dimension_numbers=(((0, 3), (3, 0)), ((1,), (1,))))
    ),
    "an einsum with an ellipsis": contraction(
        "abmn,hkn->kabhm", LENGTHS | {"m": 8}, functools.partial(einsum, "...mn,hkn->k...hm")
    ),
}
IMAGES = {
    "strides": convolution(7, 3, 2, 1, "SAME"),
    "holes": convolution(7, 2, 1, 2, "VALID"),
    "one place": convolution(3, 3, 1, 1, "VALID"),
}


def scales_of(format, x, w, grad, state):
    """The scales of delayed scaling at this step, and the next state."""
    scales, after = {}, {}
    for name, array in {"input": x, "kernel": w, "output_grad": grad}.items():
        stored, history = (np.asarray(state[f"{name}_{part}"]) for part in ("scale", "amax_history"))
        amax = history.max() if format.recipe.amax == "max" else history[0]
        after[f"{name}_scale"] = scale_from(amax, name, stored, format.margin)
        after[f"{name}_amax_history"] = rolled(history, np.abs(array).max())
        scales[name] = stored if format.recipe.delay == 2 else after[f"{name}_scale"]
    return scales, after


def scale_at_hand(format, x, name, summed):
    axes = summed if format.recipe.granularity == "row" else None
    return scale_from(np.abs(x).max(axis=axes, keepdims=True), name, 1.0, format.margin)


def products_by_hand(case, format, x, w, grad, state):
    """The three products, each with the sum of its summands' magnitudes and what ties may cost; the next state."""
    scales, after = ({}, None) if state is None else scales_of(format, x, w, grad, state)
    operands = {"input": x, "kernel": w, "output_grad": grad}
    pairs = [("input", "kernel"), ("output_grad", "kernel"), ("input", "output_grad")]
    results = []
    for product, names, summed in zip((case.forward, case.to_left, case.to_right), pairs, case.summed, strict=True):
        if product is case.to_right and not format.weight_grad:
            left, right = (operands[name].astype(np.float64) for name in names)
            results.append((product(left, right), product(np.abs(left), np.abs(right)), 0.0))
            continue
        by_name = dict(zip(names, summed, strict=True))
        at = [scales[n] if scales else scale_at_hand(format, operands[n], n, axes) for n, axes in by_name.items()]
        numbers = [(operands[name], scale, name) for name, scale in zip(names, at, strict=True)]
        (left, right), (of_left, of_right) = ([fun(*x) for x in numbers] for fun in (rounded, doubt))
        ties = product(of_left, np.abs(right)) + product(np.abs(left), of_right)
        results.append((product(left, right), product(np.abs(left), np.abs(right)), ties))
    return results, after


def check(case, format, dtype):
    """Sums of float32, or of bfloat16 in float32 and rounded, lose a few units; the result is rounded once more."""
    random = np.random.default_rng()
    arrays = [jnp.asarray(random.normal(size=shape), dtype) for shape in case.shapes]
    state = fresh_state(format.amax_history_length) if isinstance(format.recipe, DelayedScaling) else None
    *ours, new_state = computed(case.call, format, *arrays, state)
    by_hand, after = products_by_hand(case, format, *(np.asarray(a, np.float32) for a in arrays), state)
    sums = UNIT["bfloat16" if dtype == "bfloat16" else "float32"]
    if jax.default_backend() == "gpu":  # whose tensor cores add float8 products with about 14 bits
        sums = max(sums, 2.0**-14)  # DeepSeek-V3 Technical Report, 2024, section 3.3.2
    for result, (exact, magnitude, ties) in zip(ours, by_hand, strict=True):
        assert result.dtype == dtype
        error = np.abs(np.asarray(result, np.float64) - exact)
        assert (error <= 8 * sums * magnitude + UNIT[dtype] * np.abs(exact) + 2 * ties).all()
    if state is not None:
        jax.tree.map(np.testing.assert_array_equal, new_state, after)


NO_CUDNN_KERNEL = pytest.mark.cpu("cuDNN refuses this convolution of float8 with autotuning off (H200, jax 0.11.2)")
ALL_DTYPES = ("row", "row, but for the weight", "delayed")


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("case", "format", "dtype"),
    [
        *(("a batch and axes in odd orders", format, "float32") for format in FORMATS),
        *(("an einsum with an ellipsis", format, dtype) for format in ALL_DTYPES for dtype in ("bfloat16", "float16")),
        *(
            pytest.param(image, "row", "float32", marks=NO_CUDNN_KERNEL if image in ("holes", "one place") else ())
            for image in IMAGES
        ),
        *((image, "delayed, but for the weight", "bfloat16") for image in IMAGES),
        ("strides", "delayed", "float16"),
    ],
)
def test_a_product_and_its_gradients_are_those_of_the_rounded_numbers(case, format, dtype):
    check((CASES | IMAGES)[case], FORMATS[format], dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operand", "axis", "result", "along"),
    [(0, 0, 0, 0), (0, 1, 2, 0), (1, 1, 0, 1), (1, 0, 1, 1), (2, 0, 1, 0), (2, 1, 2, 1)],
    ids=["x and out", "x and grad of w", "w and out", "w and grad of x", "grad and grad of x", "grad and grad of w"],
)
def test_by_row_an_outlier_hurts_none_but_the_row_or_column_that_is_summed_with_it(operand, axis, result, along):
    operands = [np.random.default_rng().normal(size=(16, 16)).astype(np.float32) for _ in range(3)]
    kept = np.delete(computed(TWO_AXES, FORMATS["row"], *operands, None)[result], 5, axis=along)
    np.moveaxis(operands[operand], axis, 0)[5] *= 2.0**20
    spoilt = computed(TWO_AXES, FORMATS["row"], *operands, None)[result]
    np.testing.assert_array_equal(np.delete(spoilt, 5, axis=along), kept)


@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.float16])
def test_the_result_has_the_preferred_dtype_and_gradients_those_of_their_operands(preferred):
    product = functools.partial(TWO_AXES, preferred_element_type=preferred, quantization=FORMATS["current"])
    loss = lambda x, w: (lambda out: (jnp.sum(out.astype(jnp.float32)), out))(product(x, w))
    x, w = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    (of_x, of_w), out = jax.eval_shape(jax.grad(loss, (0, 1), has_aux=True), x, w)
    assert (out.dtype, of_x.dtype, of_w.dtype) == (preferred or jnp.bfloat16, jnp.bfloat16, jnp.float32)


@pytest.mark.slow
def test_float16_results_overflow_no_earlier_than_the_exact_ones():
    """448 times 448 is more than float16 holds, and so would be the sum before it is scaled."""
    x = jnp.full((16, 16), 0.5, jnp.float16)
    ours = computed(TWO_AXES, FORMATS["current"], x, x, x, None)
    assert all((result == 4).all() for result in ours[:3])
