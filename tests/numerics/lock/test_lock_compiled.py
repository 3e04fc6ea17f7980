"""The facts of compiled programs, on CPUs and for TPUs that are not there."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import make_mesh

from jmp_policy.numerics import lock
from jmp_policy.numerics._lock_compiled import _TPU_ENVIRONMENT

needs_tpu_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu compiles for TPUs")
F32, BF16 = (jax.ShapeDtypeStruct((8, 8), dtype) for dtype in (jnp.float32, jnp.bfloat16))


def compile_lock(fun, *args, of="", **options):
    locked = lock(fun, compiled=True, **options)(*args)
    return locked, [f"{row.path or '.'} | {row.what} | {row.amount}" for row in locked.rows if of in row.fact]


@jax.named_scope("head")
def attend(w, x):
    return jax.nn.softmax(x @ w)


def test_matmuls_casts_and_sums_are_read_from_the_optimized_program():
    locked, matmuls = compile_lock(attend, BF16, BF16, of="matmul")
    assert locked.compiled == jax.devices()[0].device_kind
    assert len(matmuls) == 1
    assert matmuls[0].startswith("head | ")
    assert next(row.source for row in locked.rows if row.fact == "forward matmul").endswith("(attend)")
    sums = [row for row in locked.rows if row.fact == "forward sum"]
    assert [(row.path, row.what) for row in sums] == [("head", "reduce_sum in float32")]
    operations = [row.what for row in locked.rows if row.fact == "forward operation"]
    assert operations == ["exp in float32"]  # which XLA upcasts
    assert lock(attend)(BF16, BF16).diff(locked).notes[0].startswith("compiled for: nothing, now ")


def test_iterations_of_a_loop_count():
    loop = lambda x: lax.scan(lambda c, _: (jnp.sin(c) @ x, None), x, length=7)[0]
    assert compile_lock(loop, F32, of="matmul")[1] == [". | float32 x float32 -> float32 | 7 times"]
    assert compile_lock(loop, F32, of="operation")[1] == [". | sin in float32 | 7 times"]


def test_precisions_and_roundings_are_read():
    _, matmuls = compile_lock(functools.partial(jnp.dot, precision="highest"), F32, F32, of="matmul")
    assert matmuls == [". | float32 x float32 -> float32, precision HIGHEST | 1 time"]
    _, casts = compile_lock(lambda x: lax.reduce_precision(x, 8, 7), F32, of="cast")
    assert casts == [". | float32 -> e8m7 | 64 elements"]


def test_combined_collectives_have_a_scope_each():
    mesh = make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        with jax.named_scope("up"):
            h = jax.nn.relu(x @ w["up"])
        with jax.named_scope("down"):
            return (h @ w["down"]).mean()

    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    args = {"up": place((8, 16), P()), "down": place((16, 8), P())}, place((8, 8), P("data"))
    found = [compile_lock(jax.value_and_grad(fun), *args, of="collective") for fun in (loss, jax.jit(loss))]
    [sums, in_jit], sum_of = [lines for _, lines in found], "all-reduce sum in float32 over data | 1 time"
    assert sums == [f"down | {sum_of}, 4 bytes", f"down | {sum_of}, 512 bytes", f"up | {sum_of}, 512 bytes"]
    assert in_jit == sums


@needs_tpu_compiler
@pytest.mark.slow
def test_a_program_is_compiled_for_a_tpu_that_is_not_there():
    locked, matmuls = compile_lock(attend, F32, F32, of="matmul", platform="tpu")
    assert locked.compiled == "TPU v5 lite"
    assert matmuls == ["head | float32 x float32 -> float32, multiplied in bfloat16 | 1 time"]
    loop = lambda x: lax.scan(lambda c, _: (jnp.sin(c) @ x, None), x, length=7)[0]
    assert compile_lock(loop, BF16, of="matmul", platform="tpu")[1] == [". | bfloat16 x bfloat16 -> bfloat16 | 7 times"]


@pytest.fixture
def tpus(monkeypatch):
    """Four TPUs that are not there."""
    for name, text in _TPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, text)
    from jax.experimental import topologies

    return topologies.get_topology_desc("v5e:2x2", "tpu").devices


@needs_tpu_compiler
@pytest.mark.slow
def test_collectives_of_a_tpu_mesh_that_is_not_there_are_counted_once(tpus):
    mesh = jax.sharding.Mesh(tpus, ("data",))
    split = NamedSharding(mesh, P("data"))

    def total(w, x):
        for each in w:
            x = jnp.tanh(x @ each)
        return jax.shard_map(lambda x: lax.ppermute(x.astype(jnp.bfloat16), "data", [(0, 1), (1, 0)]), mesh=mesh,
                             in_specs=P("data"), out_specs=P("data"))(x)  # fmt: skip

    w = [jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=split)] * 3
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=split)
    locked, found = compile_lock(total, w, x, of="collective")
    assert locked.platform == "tpu"
    counts = {line.split(" | ")[1]: line.split(" | ")[2].split(",")[0] for line in found}
    assert counts["collective-permute in bfloat16 over data"] == "1 time"
    assert sum(int(count.split()[0]) for what, count in counts.items() if "all-gather" in what) == 3


@needs_tpu_compiler
@pytest.mark.slow
def test_a_gather_has_the_dtype_that_is_sent_at_last(tpus):
    """The partitioner of XLA moves a gather before a cast, and a later pass for TPUs moves it back."""
    mesh = jax.sharding.Mesh(tpus, ("data",))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def gather(x, *, barrier):
        x = (x * 2).astype(jnp.bfloat16)
        x = lax.optimization_barrier(x) if barrier else x
        return lax.with_sharding_constraint(x, whole) * 2

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)
    gathers = [functools.partial(gather, barrier=barrier) for barrier in (False, True)]
    found = [line.split(" | ")[1] for fun in gathers for line in compile_lock(fun, x, of="collective")[1]]
    assert found == ["all-gather in bfloat16 over data"] * 2


def test_a_mesh_of_other_devices_is_refused():
    mesh = make_mesh((2,), ("data",))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match="The arguments are on a mesh of other devices than the program is to be comp"):
        compile_lock(jnp.sin, x, platform="tpu")


def test_what_xla_cannot_compile_is_an_error_of_one_line():
    with pytest.raises(
        ValueError, match=r"^XLA cannot compile the program for .*: .*\. Lock the traced program\."
    ) as error:
        compile_lock(lambda x: jax.lax.platform_dependent(x, tpu=jnp.sin), F32)
    assert "\n" not in str(error.value)
