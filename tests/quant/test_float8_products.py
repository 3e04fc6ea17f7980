"""Products in 8-bit floating point against NumPy's in float64, forward and backward; their casts and their state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from float8_reference import (
    FORMATS as DTYPES,
    LARGEST,
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
from jax import lax

from jmp_policy.quant import CurrentScaling, DelayedScaling, Float8, dot_general, einsum, float8_state

Float8 = functools.partial(Float8, amax_history_length=3, min_size=0)
FORMATS = {
    "current": Float8(CurrentScaling()),
    "current, with a margin": Float8(CurrentScaling(), margin=2),
    "row": Float8(CurrentScaling("row")),
    "row, but for the weight": Float8(CurrentScaling("row"), weight_grad=False),
    "delayed": Float8(),
    "delayed, but for the weight": Float8(weight_grad=False),
    "most recent": Float8(DelayedScaling("most_recent"), margin=1),
    "most recent, delayed by two": Float8(DelayedScaling("most_recent", delay=2)),
}
LENGTHS = {"a": 2, "b": 3, "k": 4, "l": 8, "m": 16, "n": 16, "h": 8}
ODD_AXES = functools.partial(dot_general, dimension_numbers=(((0, 3), (3, 0)), ((1,), (1,))))
CASES = {
    "a batch and axes in odd orders": contraction("kbml,lbnk->bmn", LENGTHS, ODD_AXES),
    "an ellipsis": contraction("abmn,hkn->kabhm", LENGTHS | {"m": 8}, functools.partial(einsum, "...mn,hkn->k...hm")),
    "strides": convolution(7, 3, 2, 1, "SAME"),
    "holes": convolution(7, 2, 1, 2, "VALID"),
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


NO_CUDNN_KERNEL = pytest.mark.cpu("cuDNN refuses this convolution of float8 with autotuning off (H200, jax 0.11.2)")


@pytest.mark.parametrize(
    ("case", "format", "dtype"),
    [
        ("a batch and axes in odd orders", "most recent", "float32"),
        ("an ellipsis", "row, but for the weight", "float16"),
        pytest.param("holes", "row", "float32", marks=NO_CUDNN_KERNEL),
        ("strides", "delayed, but for the weight", "bfloat16"),
        *(
            pytest.param("a batch and axes in odd orders", format, "float32", marks=pytest.mark.slow)
            for format in ("current, with a margin", "row", "most recent, delayed by two")
        ),
    ],
)
def test_a_product_and_its_gradients_are_those_of_the_rounded_numbers(case, format, dtype):
    """Sums of float32, or of bfloat16 in float32 and rounded, lose a few units; the result is rounded once more."""
    case, format, random = CASES[case], FORMATS[format], np.random.default_rng()
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


@pytest.mark.parametrize("name", ["input", "output_grad"])
def test_casts_saturate_and_else_round_to_the_nearest_even(name):
    """A product with the identity under scales of one shows each cast number in a row of its own."""
    limit, least = LARGEST[name], np.float32({"input": 2.0**-9, "output_grad": 2.0**-16}[name])
    edges = np.array([limit, limit * 1.01, limit * 1.04, limit * 2, 3e38, 0, 1e-30], np.float32)
    subnormals = least * np.array([0.5, 0.51, 1, 1.5, 2.5, 3], np.float32)
    random = np.exp(np.random.default_rng().normal(size=226) * 6).astype(np.float32)
    numbers = np.concatenate([edges, subnormals, np.arange(16, 33, dtype=np.float32), random])
    x, zeros = np.pad(np.concatenate([numbers, -numbers])[:, None], ((0, 0), (0, 15))), np.zeros((512, 16), np.float32)
    state = {k: jnp.full_like(v, float(k.endswith("scale"))) for k, v in float8_state(Float8()).items()}
    operands = (x, np.eye(16, dtype=np.float32), zeros) if name == "input" else (zeros, np.eye(16, dtype=np.float32), x)
    results = computed(TWO_AXES, Float8(DelayedScaling(delay=2)), *operands, state)
    ours = np.asarray(results[0 if name == "input" else 1])[:, 0]
    np.testing.assert_array_equal(ours, np.clip(x[:, 0], -limit, limit).astype(DTYPES[name]).astype(np.float32))


@pytest.mark.slow
def test_float16_results_overflow_no_earlier_than_the_exact_ones():
    """448 times 448 is more than float16 holds, and so would be the sum before it is scaled."""
    x = jnp.full((16, 16), 0.5, jnp.float16)
    ours = computed(TWO_AXES, FORMATS["current"], x, x, x, None)
    assert all((result == 4).all() for result in ours[:3])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("current", 1e-40), ("row", 1e15), ("delayed", 1e-30)])
def test_numbers_of_any_size_give_finite_products(name, size):
    format, state = FORMATS[name], fresh_state(3) if name == "delayed" else None
    x, w = (jnp.asarray(np.random.default_rng().normal(size=(16, 16)), jnp.float32) for _ in range(2))
    results = computed(TWO_AXES, format, x * size, w, w * size, state)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(results))
    if name == "row":
        np.testing.assert_allclose(results[0] / size, x @ w, atol=3)
    zeros = jnp.zeros((16, 16))
    assert not any(jnp.any(array) for array in computed(TWO_AXES, format, zeros, zeros, zeros, state)[:3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format", "bad"),
    [("input", "delayed", np.nan), ("kernel", "current", -np.inf), ("output_grad", "delayed", np.inf)],
)
def test_what_is_not_finite_is_seen_in_the_results_and_not_in_the_state(name, format, bad):
    operands = {each: np.random.default_rng().normal(size=(16, 16)).astype(np.float32) for each in DTYPES}
    operands[name][3, 5] = bad
    state = fresh_state(3) if format == "delayed" else None
    if state is not None:  # a history that is damaged leaves the scale as it was
        state["kernel_amax_history"] = state["kernel_amax_history"].at[1].set(jnp.inf)
    out, *grads, after = computed(TWO_AXES, FORMATS[format], *operands.values(), state)
    finite = [bool(jnp.isfinite(array).all()) for array in (out, *grads)]
    seen = {"input": (0, 2), "kernel": (0, 1), "output_grad": (1, 2)}[name]
    assert finite == [i not in seen for i in range(3)]
    if state is not None:
        amax = {each: 0.0 if each == name else np.abs(array).max() for each, array in operands.items()}
        for each in DTYPES:
            before = np.asarray(state[f"{each}_amax_history"])
            np.testing.assert_array_equal(after[f"{each}_amax_history"], rolled(before, amax[each]))
            expected = scale_from(before.max(), each, state[f"{each}_scale"])
            np.testing.assert_array_equal(after[f"{each}_scale"], expected)


def sequence():
    """Inputs, weights and gradients of steps that outgrow and underrun the scales of those before."""
    random = np.random.default_rng()
    return tuple(
        np.float32(random.normal(size=(6, 16, 16)) * np.exp(random.normal(size=(6, 1, 1)) * 2)) for _ in range(3)
    )


def run_steps(product, state, arrays):
    """The results, gradients and states of each step."""

    def step(state, arrays):
        x, w, grad = arrays
        out, backward = jax.vjp(product, x, w, state)
        *grads, state = backward(grad)
        return state, (out, grads, state)

    return jax.jit(functools.partial(lax.scan, step))(state, arrays)[1]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4])
def test_states_and_results_are_those_of_flax_bit_for_bit(length):
    arrays, format = sequence(), Float8(amax_history_length=length)
    ours = functools.partial(TWO_AXES, quantization=format)
    operation = fp8_ops.Fp8DirectDotGeneralOp(amax_history_length=length)
    flax = lambda x, w, state: operation.apply({"_overwrite_with_gradient": state}, x, w, (((1,), (0,)), ((), ())))
    out, grads, states = run_steps(lambda x, w, state: ours(x, w, state=state), float8_state(format), arrays)
    of_out, of_grads, of_states = run_steps(flax, float8_state(format), arrays)
    jax.tree.map(np.testing.assert_array_equal, (out, states), (of_out, of_states))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, grads, of_grads)  # one of theirs is the transpose of a product


@pytest.mark.slow
def test_a_weight_that_is_differentiated_without_its_state_is_an_error():
    """Under `jit` and `scan` too; a frozen layer that passes gradients on needs no gradient of its state."""
    product = functools.partial(TWO_AXES, quantization=Float8())
    x, w, state = jnp.ones((16, 16)), jnp.ones((16, 16)), fresh_state(3)
    loss = lambda x, w, state: jnp.sum(product(x, w, state=state))
    scanned = lambda x, w, state: jax.lax.scan(lambda x, _: (product(x, w, state=state), None), x, length=2)[0].sum()
    text = r"^The weight of shape \(16, 16\), multiplied in 'float8.*jmp\.value_and_grad\("
    for fun in (loss, jax.jit(loss), scanned, jax.checkpoint(scanned)):
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(jax.grad(fun, argnums=(0, 1)), x, w, state)
        assert jax.eval_shape(jax.grad(fun), x, w, state).shape == x.shape
