"""The facts of a lock: what is in it of each kind of operation, argument and result, and what is not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, PartitionSpec as P

import jmp_policy as jmp
from jmp_policy.numerics import lock

F32, BF16 = (jax.ShapeDtypeStruct((4, 4), dtype) for dtype in (jnp.float32, jnp.bfloat16))


def facts(fun, *args, of="", **options):
    """The facts of a function in `of`, without those of arguments and results unless it names them."""
    rows = lock(fun, **options)(*args).rows
    return [" | ".join((row.path or ".", row.fact, row.what, row.amount)) for row in rows if of in row.fact and
            (of or row.fact.split()[0] not in ("argument", "result"))]  # fmt: skip


FOREIGN = Primitive("foreign")
FOREIGN.def_abstract_eval(lambda x, y: x)


def on_blocks(x):
    def square(x, out):
        out[...] = jnp.dot(x[...], x[...].T, preferred_element_type=jnp.float32)

    halves, result = pl.BlockSpec((2, 4), lambda i: (i, 0)), jax.ShapeDtypeStruct((2, 2), jnp.float32)
    return pl.pallas_call(square, grid=(2,), in_specs=[halves], out_shape=result, interpret=True)(x)


OPERATIONS = {
    "matmul": (lambda x, y: x @ y, "bfloat16 x float32 -> float32 | 1 time"),
    "matmul of an outer product": (lambda x, y: x[:, :1] @ x[:1], "float32 x float32 -> float32 | 1 time"),
    "matmul in highest": (lambda x, y: lax.dot(x, x, precision="highest"),
                          "float32 x float32 -> float32, precision HIGHEST | 1 time"),
    "matmul in default": (lambda x, y: lax.dot(x, x, precision="default"), "float32 x float32 -> float32 | 1 time"),
    "matmul by an algorithm": (lambda x, y: lax.dot(x, x, precision="TF32_TF32_F32"), "float32 x float32 -> float32, "
                               "precision TF32_TF32_F32, multiplied in TF32 | 1 time"),
    "matmul of a convolution": (lambda x, y: lax.conv(y[None, None], y[None, None], (1, 1), "SAME"),
                                "bfloat16 x bfloat16 -> bfloat16 | 1 time"),
    "matmul in a loop": (lambda x, y: lax.scan(lambda c, _: (c @ x, None), x, length=7)[0],
                         "float32 x float32 -> float32 | 7 times"),
    "matmul of dead code": (lambda x, y: (x @ x, x)[1],),
    "cast": (lambda x, y: (x.astype(jnp.bfloat16) + y, y.astype(jnp.float16)), "float32 -> bfloat16 | 16 elements",
             "bfloat16 -> float16 | 16 elements"),
    "cast of quantized values": (lambda x, y: x.astype(jnp.int8).astype(jnp.float32), "float32 -> int8 | 16 elements",
                                 "int8 -> float32 | 16 elements"),
    "cast of whole numbers": (lambda x, y: (x > 0).astype(jnp.float32) + jnp.arange(4).astype(jnp.float32),),
    "operation": (lambda x, y: (jnp.exp(x), jnp.tanh(y)), "exp in float32 | 1 time", "tanh in bfloat16 | 1 time"),
    "sum": (lambda x, y: (lax.reduce_sum(y, (0, 1)), jnp.cumsum(x)), "reduce_sum in bfloat16 | 1 time, of up to 16 "
            "elements", "cumsum in float32 | 1 time, of up to 16 elements"),
    "sum that chooses": (lambda x, y: x.max(),),
    "arithmetic": (lambda x, y: x * 2 - x[:2, :2].sum(), "in float32 | arrays of up to 16 elements"),
    "arithmetic of moves": (lambda x, y: jnp.where(x.T > 0, jnp.roll(x, 1), 0.0)[::2].reshape(-1),),
    "cast of other bits": (lambda x, y: (lax.reduce_precision(x, 8, 7), lax.reduce_precision(y, 8, 7)),
                           "float32 -> e8m7 | 16 elements"),
    "kernel of another library": (lambda x, y: FOREIGN.bind(x, y), "foreign float32 bfloat16 -> float32 | 1 time"),
    "kernel of Pallas": (lambda x, y: on_blocks(y), "pallas_call bfloat16 -> float32 | 1 time"),
    "matmul of Pallas": (lambda x, y: on_blocks(y), "bfloat16 x bfloat16 -> float32 | 2 times"),
    "kernel": (lambda x, y: jax.pure_callback(abs, F32, x), "pure_callback float32 -> float32 | 1 time"),
}  # fmt: skip
"""By kind: a function of `F32` and `BF16`, and its facts of that kind on a CPU."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_kind_of_operation_has_its_line(name):
    fun, *expected = OPERATIONS[name]
    with jax.numpy_dtype_promotion("standard"):
        found = facts(fun, F32, BF16, of=f"forward {name.split()[0]}", platform="cpu")
    assert sorted(line.split(" | ", 2)[2] for line in found) == sorted(expected)


@pytest.mark.parametrize(
    ("platform", "text"), [("cpu", ""), ("tpu", ", multiplied in bfloat16"), ("cuda", ", multiplied in TF32")]
)
def test_float32_matmuls_name_what_the_platform_multiplies_in(platform, text):
    assert facts(jnp.dot, F32, F32, platform=platform) == [
        f". | forward matmul | float32 x float32 -> float32{text} | 1 time"
    ]


def test_the_branch_of_the_platform_counts():
    fun = lambda x: lax.platform_dependent(x, tpu=jnp.exp, cuda=jnp.log, default=jnp.tanh)
    names = [facts(fun, F32, platform=platform)[0].split(" | ")[2] for platform in ("tpu", "cuda", "cpu")]
    assert names == ["exp in float32", "log in float32", "tanh in float32"]


@pytest.mark.parametrize("spec", ["ij,jk->ik", "ij,jk", "...ij,jk->...ik"])
def test_einsum_opens_no_scope_and_other_names_with_a_comma_are_scopes(spec):
    einsum = lambda x: jax.named_scope("a,b")(lambda x: jnp.einsum(spec, x, x))(x)
    assert facts(einsum, F32, of="matmul")[0].startswith("a,b | ")


@pytest.mark.parametrize("around", [jax.jit, lambda layer: lambda x, w: lax.scan(layer, x, w[None])[0]])
def test_a_remat_in_a_loop_has_the_scope_of_its_forward_pass(around):
    def layer(x, w):
        with jax.named_scope("layer"):
            made = jax.checkpoint(lambda x: jnp.sin(x @ w))(x)
        return made, None

    called = around(layer)
    with_scope = jax.named_scope("stack")(lambda w, x: jnp.sum(jax.tree.leaves(called(x, w))[0]))
    found = facts(jax.value_and_grad(with_scope), F32, F32, of="matmul")
    assert {line.split(" | ")[1] for line in found} == {"forward matmul", "recomputed matmul", "backward matmul"}
    assert {line.split(" | ")[0] for line in found} == {"stack/layer"}


def test_passes_and_scopes_have_lines_of_their_own():
    def loss(w, x):
        with jax.named_scope("head"):
            return jax.checkpoint(lambda w: jnp.sin(jnp.tanh(x @ w)).sum())(w)

    found = facts(jax.value_and_grad(loss), F32, F32)
    assert {line.split(" | ")[1].split()[0] for line in found} == {"forward", "recomputed", "backward"}
    assert {line.split(" | ")[0] for line in found} == {"head"}


def test_collectives_of_a_shard_map_are_counted_on_devices_that_need_not_be_there():
    mesh = AbstractMesh((8,), ("data",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
    def total(x):
        return lax.psum(x.astype(jnp.bfloat16), "data")

    x = jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=jax.NamedSharding(mesh, P("data")))
    assert ". | forward collective | all-reduce sum in bfloat16 over data | 1 time, 12 bytes" in facts(total, x)


def test_arguments_state_and_results_have_their_dtypes_and_counters_have_none():
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    tx = jmp.optim.loss_scaled(optax.adam(1e-3, mu_dtype=jnp.bfloat16), policy.loss_scale())
    params = {"w": jnp.ones((4, 4)), "q": jmp.quant.quantize_array(jnp.ones((4, 4)), "int8")}
    state = tx.init({"w": params["w"]})
    fun = lambda params, state, *, rate: (params["w"] * 2, {"state": state.inner_state})
    lines = lock(functools.partial(fun, rate=0.5))(params, state).rows
    assert [str(row) for row in lines if row.fact.startswith(("argument", "result"))] == [
        "params/q | argument quantized | int8 of float32 | shape 4x4",
        "params/w | argument | float32 | shape 4x4",
        "state/inner_state/0/mu/w | argument | bfloat16 | shape 4x4",
        "state/inner_state/0/nu/w | argument | float32 | shape 4x4",
        "state/loss_scale | argument scale | DynamicLossScale | period 2000, factor 2.0, min_loss_scale 1.0, "
        "backoff_factor 0.5, max_loss_scale 16777216.0, hysteresis 1, consecutive_hysteresis False",
        "result/0 | result | float32 | shape 4x4",
        "result/1/state/0/mu/w | result | bfloat16 | shape 4x4",
        "result/1/state/0/nu/w | result | float32 | shape 4x4",
    ]


def test_an_array_of_numpy_has_the_dtype_that_is_read():
    assert facts(jnp.sin, np.ones(4), of="argument") == facts(jnp.sin, jnp.ones(4), of="argument")


def test_a_checkpoint_policy_writes_no_casts():
    dots = jax.checkpoint_policies.dots_saveable
    loss = lambda x: jax.checkpoint(lambda x: jnp.sin(x @ x), policy=dots)(x).astype(jnp.float32).sum()
    assert [line for line in facts(jax.grad(loss), BF16, of="cast") if "e8m7" in line] == []


def test_a_module_whose_parameter_changes_its_dtype_has_a_line():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def spoil(model, x):
        model.kernel.set_value(model.kernel[...].astype(jnp.bfloat16))

    assert "model/kernel | update | float32 becomes bfloat16 | shape 4x4" in facts(spoil, model, F32, of="update")
    assert model.kernel.dtype == jnp.float32


def test_the_policies_of_a_lock_are_those_of_its_function_and_modules():
    rules = jmp.PolicyMap({"layers/1": "float32", nnx.LayerNorm: "float32"}, default="mixed_bfloat16")
    layers = nnx.LayerNorm(4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    model = jmp.with_policy(nnx.Sequential(*layers), rules)
    specs = {". rule 'layers/1'": "float32", ". rule LayerNorm": "float32", ".": "mixed_bfloat16"}
    given = tuple((place, str(jmp.get_policy(spec))) for place, spec in specs.items())
    assert lock(lambda model, x: model(x))(model, F32).policies == given
    dense = jmp.with_policy(nn.Dense(4), "bfloat16")
    variables = jax.eval_shape(dense.init, jax.random.key(0), F32)
    assert lock(dense.apply)(variables, F32).policies == ((".", str(jmp.get_policy("bfloat16"))),)
    assert lock(jmp.with_policy(jnp.sin, "float16"))(F32).policies == ((".", str(jmp.get_policy("float16"))),)


def test_a_platform_that_is_none_and_a_module_in_place_of_a_function_are_refused():
    with pytest.raises(ValueError, match=r"^Unknown platform 'cuba'\. Did you mean 'cuda'\? For example: 'tpu'\.$"):
        lock(jnp.dot, platform="cuba")
    with pytest.raises(
        TypeError, match=r"^lock takes a function, got .*\. For example: lock\(model\.apply\)\(variables, x\)\.$"
    ):
        lock(nn.Dense(4))
