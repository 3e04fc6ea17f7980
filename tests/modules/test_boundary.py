"""Laws 9, 11 and 13 for functions: casts at the boundary, once, under every transformation of JAX."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh

import jmp_policy as jmp

MIXED = "params=float32,compute=bfloat16,output=float32"
MESH = make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)


def square_sum(x):
    return (x * x).sum()


def by_hand(policy, fun):
    """What an expert writes: the same casts, in place."""

    @functools.wraps(fun)
    def written(*args, **kwargs):
        args, kwargs = policy.cast_to_compute((args, kwargs))
        return policy.cast_to_output(fun(*args, **kwargs))

    return written


TRANSFORMATIONS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(x).sum(),
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "scan": lambda f: lambda x: jax.lax.scan(lambda carry, row: (carry, f(row)), 0.0, x)[1],
    "while": lambda f: lambda x: jax.lax.fori_loop(0, 3, lambda _, row: row + f(row), x[0]),
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] < 0, f, lambda x: f(2 * x), x),
    "shard_map": lambda f: (
        lambda x: jax.shard_map(lambda rows: f(rows)[None], mesh=MESH, in_specs=P("d"), out_specs=P("d"))(x)
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMATIONS)
def test_a_transformed_function_is_the_hand_written_program(transform):
    policy, transform = jmp.get_policy(MIXED), TRANSFORMATIONS[transform]
    functions = jmp.with_policy(square_sum, policy), jmp.with_policy(policy)(square_sum), by_hand(policy, square_sum)
    ours, decorated, expected = (jax.jit(transform(fun)).lower(X) for fun in functions)
    assert ours.as_text() == decorated.as_text() == expected.as_text()
    assert ours.out_info == expected.out_info


@pytest.mark.filterwarnings("ignore:.* is a function. .* of its policy has no effect:UserWarning")
def test_positional_keyword_and_nested_inputs_and_outputs_are_cast(any_policy):
    @jmp.with_policy(any_policy)
    def probe(a, *rest, b, **more):
        dtypes.extend(str(x.dtype) for x in (a["x"], rest[0], b, more["c"][1]))
        return {"out": np.ones(2, np.float32), "n": np.arange(2), "s": "text"}

    dtypes = []
    with jax.enable_x64("float64" in str(any_policy)):
        out = probe({"x": X}, X, b=X, c=(3, X))
    assert set(dtypes) == {str(any_policy.resolve(X).compute_dtype)}
    assert out["s"] == "text"
    assert out["n"].dtype == np.arange(2).dtype
    assert out["out"].dtype == (any_policy.output_dtype or np.float32)


@pytest.mark.parametrize("policy", ["float64", "params=float64,compute=float32,output=none"])
def test_float64_needs_64_bits(policy):
    policy = jmp.get_policy(policy)
    double = jmp.with_policy(lambda x: x, policy)
    with jax.enable_x64(True):
        assert double(jnp.ones(2, jnp.float32)).dtype == policy.compute_dtype
        assert policy.cast_to_param(jnp.ones(2, jnp.float32)).dtype == jnp.float64
    text = r"needs jax\.config\.update\('jax_enable_x64', True\): without it, JAX computes in float32\. For example: "
    with pytest.raises(ValueError, match=re.escape(f"The policy {policy.name!r} ") + text + "'.*float32"):
        double(jnp.ones(2))
    for leaf in (jnp.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32)):
        with pytest.raises(ValueError, match=f"^A cast to 'float64' {text}cast_floating"):
            policy.cast_to_param(leaf)


def test_numpy_stays_numpy_and_other_values_keep_their_identity():
    key, objects = jax.random.key(0), object()

    @jmp.with_policy(MIXED)
    def probe(*args):
        assert isinstance(args[0], np.ndarray)
        assert args[0].dtype == jnp.bfloat16
        return args[1:]

    values = (key, objects, 1.5, None, "text", np.arange(2))
    assert all(a is b for a, b in zip(probe(X, *values), values, strict=True))


def test_kept_arguments_enter_uncast_however_they_are_passed():
    @jmp.with_policy("float16", no_cast=["position", "rest", "extra"])
    def dtypes(x, position, /, *rest, t=None, **extra):
        return [str(v.dtype) for v in (x, position, *rest, t, *extra.values())]

    half, full = "float16", "float32"
    assert dtypes(X, X, X, t=X, u=X) == [half, full, full, half, half]

    @jmp.with_policy("float16", no_cast={"position"})
    def dtype(x, position):
        return str(position.dtype)

    assert dtype(X, X) == dtype(X, position=X) == dtype(position=X, x=X) == full


def test_a_policied_function_inside_another_keeps_its_own_policy():
    inner = jmp.with_policy(lambda x: (str(x.dtype), x), "p=f32,c=f16,o=f16")
    outer = jmp.with_policy(lambda x: inner(x), "p=f32,c=bf16,o=f32")
    dtype, out = outer(jnp.ones(2))
    assert (dtype, str(out.dtype)) == ("float16", "float32")


def test_a_second_call_does_not_trace_again():
    traces = []

    @jax.jit
    @jmp.with_policy(MIXED)
    def f(x):
        traces.append(x)
        return x

    for _ in range(3):
        f(X)
    assert len(traces) == 1


def test_applying_a_policy_anew_does_not_trace_what_is_inside_anew():
    traces = []
    inside = jax.jit(lambda x: traces.append(x) or x)

    def f(x):
        return inside(x)

    class Model:
        def method(self, x):
            return inside(x)

    model = Model()
    for _ in range(3):
        jmp.with_policy(f, MIXED, no_cast=["x"])(X)
    assert len(traces) == 1
    for _ in range(3):
        jmp.with_policy(model.method, MIXED)(X)
    assert len(traces) == 2


def test_the_same_function_under_another_policy_or_that_keeps_other_arguments_is_another_boundary():
    def f(x, inner=None):
        return inner(x.astype(jnp.float32)) if inner else x

    inner = jmp.with_policy(f, "float16")
    assert jmp.with_policy(f, "bfloat16")(X, lambda x: str(inner(x).dtype)) == "float16"
    assert jmp.with_policy(f, "float16", no_cast=["x"])(X, lambda x: str(inner(x).dtype)) == "float16"


def test_infer_takes_the_dtype_of_the_first_floating_input_of_each_call():
    f = jmp.with_policy(lambda n, x, y: str(y.dtype), "infer")
    assert f(jnp.arange(2), jnp.ones(2, jnp.float16), X) == "float16"
    assert f(jnp.arange(2), X, jnp.ones(2, jnp.float16)) == "float32"
    assert jmp.with_policy(lambda x, y: str(y.dtype), "infer", no_cast=["x"])(jnp.float16(1), X) == "float32"


@pytest.mark.usefixtures("no_default_precision")
def test_precision_of_the_policy_holds_inside_and_nowhere_else():
    dot = jmp.with_policy(lambda x: x @ x.T, "c=f32,precision=highest")
    assert "HIGHEST" in str(jax.make_jaxpr(dot)(X))
    assert "HIGHEST" not in str(jax.make_jaxpr(lambda x: dot(x) @ x)(X)).rsplit("dot_general", 1)[1]


@pytest.mark.filterwarnings("ignore:.* is a function. .* of its policy has no effect:UserWarning")
def test_a_map_gives_a_function_the_policy_of_the_root():
    rules = jmp.PolicyMap({"head": "float16"}, "bfloat16")
    fun = jmp.with_policy(lambda x: x, rules)
    assert fun(X).dtype == jnp.bfloat16
    assert jmp.policy_of(fun) is rules


def test_custom_derivatives_are_kept():
    @jax.custom_vjp
    def f(x):
        return x * x

    f.defvjp(lambda x: (x * x, x), lambda x, g: (g * 100,))
    grad = jax.grad(lambda x: jmp.with_policy(f, MIXED)(x))(2.0 * jnp.ones(()))
    assert (float(grad), grad.dtype) == (100.0, jnp.float32)


def test_metadata_and_policy_are_on_the_result_and_the_target_is_untouched():
    fun = jmp.with_policy(square_sum, MIXED)
    assert fun.__name__ == "square_sum"
    assert fun.__wrapped__ is square_sum
    assert jmp.policy_of(fun) is jmp.get_policy(MIXED)
    assert jmp.policy_of(square_sum) is None
    assert square_sum(jnp.asarray(X)).dtype == jnp.float32


STRING = r"^no_cast must be a collection of argument names, got the string 'x'; write \['x'\]"


@pytest.mark.parametrize(
    ("target", "policy", "no_cast", "message"),
    [
        (square_sum, "nope", (), r"^Unknown dtype or policy 'nope'"),
        (square_sum, MIXED, ["y"], r"^no_cast names 'y', but square_sum has no such argument\. Its .* are 'x'\.$"),
        (lambda: 0, MIXED, ["y"], r"Its arguments are none\.$"),
        *[(target, MIXED, "x", STRING) for target in (square_sum, nn.Dense(2), nn.Dense, nnx.Linear)],
    ],
)
def test_bad_policies_and_names_of_arguments_are_errors(target, policy, no_cast, message):
    with pytest.raises(ValueError, match=message):
        jmp.with_policy(target, policy, no_cast=no_cast)


@pytest.mark.parametrize("give", [jmp.with_policy, jmp.autocast])
def test_a_policy_by_keyword_gives_a_decorator(give):
    @give(policy="p=f32,c=bf16,o=f16")
    def product(x):
        return x @ x.T

    class Model:
        @give(policy="p=f32,c=bf16,o=f16")
        def method(self, x):
            return x @ x.T

        @staticmethod
        @give(policy="p=f32,c=bf16,o=f16")
        def static(x):
            return x @ x.T

    for fun in (product, Model().method, Model.static):
        assert fun(X).dtype == jnp.float16
        assert "bf16" in str(jax.make_jaxpr(fun)(X))


def test_a_decorator_by_keyword_keeps_arguments_and_modules():
    @jmp.with_policy(policy="bfloat16", no_cast=["t"])
    def dtypes(x, t):
        return [str(x.dtype), str(t.dtype)]

    assert dtypes(X, X) == ["bfloat16", "float32"]
    module = jmp.with_policy(policy="bfloat16")(nn.Dense(2))
    assert jmp.policy_of(module).name == "bfloat16"


@pytest.mark.parametrize("give", [jmp.with_policy, jmp.autocast])
def test_a_decorator_without_a_policy_captures_the_default(give):
    with jmp.use_policy("float16"):
        decorators = [give(), give(policy=None), give(None)]
    assert [decorate(lambda x: x)(X).dtype for decorate in decorators] == [jnp.float16] * 3


@pytest.mark.parametrize("give", [jmp.with_policy, jmp.autocast])
def test_a_target_that_is_none_is_an_error_not_a_decorator(give):
    with pytest.raises(TypeError, match=r"takes a function.*, got None\."):
        give(None, "bfloat16")
    with pytest.raises(TypeError, match=r"takes a function.*, got None\."):
        give(None, policy="bfloat16")
    with pytest.raises(ValueError, match="bflaot16"):
        give(policy="bflaot16")


LONG = "x" * 1_000_000


@pytest.mark.parametrize(("fun", "no_cast"), [(square_sum, [LONG]), (square_sum, LONG), (int.from_bytes, [LONG])])
def test_errors_of_no_cast_do_not_repeat_a_long_input(fun, no_cast):
    with pytest.raises(ValueError, match=r"^no_cast .* \.\.\. ") as error:
        jmp.with_policy(fun, MIXED, no_cast=no_cast)
    assert len(str(error.value)) < 2000
