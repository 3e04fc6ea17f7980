"""Collectives in the dtypes of a policy: what moves, what it is summed in, and what passes by identity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from meshes import make_mesh
from sharded_models import list_moved

import jmp_policy as jmp

POLICY = "params=float32,compute=bfloat16,output=float32,reduce=float32"
BOTH = ("data", "fsdp")
SPLIT = P(BOTH)
REDUCING = {"psum": jmp.sharding.psum, "pmean": jmp.sharding.pmean, "psum_scatter": jmp.sharding.psum_scatter}


def mesh():
    return make_mesh((2, 2), BOTH, axis_types=(AxisType.Auto,) * 2)


def on_devices(fun, *, specs=SPLIT, out_specs=None, **options):
    out_specs = specs if out_specs is None else out_specs
    return jax.jit(jax.shard_map(fun, mesh=mesh(), in_specs=specs, out_specs=out_specs, **options))


def moved(fun, *args):
    return [(kind, dtype) for kind, dtype, _ in list_moved(fun, *args)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check_vma"), [*zip(REDUCING, (True, False, True), strict=True)])
def test_half_precision_is_summed_in_float32(name, check_vma):
    """Against float64: one rounding of the sum to bfloat16, where four devices add to 256 what bfloat16 loses there."""
    rng = np.random.default_rng()
    values = (rng.uniform(0.1, 0.9, (16, 8)) + 256 * (np.arange(16) < 4)[:, None]).astype(jnp.bfloat16)
    options = {"scatter_dimension": 1, "tiled": True} if name == "psum_scatter" else {}
    out = P(None, BOTH) if options else P()
    fun = on_devices(lambda x: REDUCING[name](x, BOTH, POLICY, **options), out_specs=out, check_vma=check_vma)
    total = np.asarray(fun(values))
    exact = values.astype(np.float64).reshape(4, 4, 8).sum(0) / (4 if name == "pmean" else 1)
    assert total.dtype == jnp.bfloat16
    assert np.abs(total.astype(np.float64) - exact).max() <= 2.0**-8 * np.abs(exact).max()
    kind = "reduce_scatter" if options else "all_reduce"
    assert moved(fun, jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)) == [(kind, "f32")]


@pytest.mark.parametrize(
    "name", ["psum", *[pytest.param(n, marks=pytest.mark.slow) for n in ("pmean", "psum_scatter")]]
)
def test_without_a_reduce_dtype_the_program_is_jax_s_own(name):
    options = {"scatter_dimension": 1, "tiled": True} if name == "psum_scatter" else {}
    out = P(None, BOTH) if options else P()
    ours = on_devices(lambda x: REDUCING[name](x, BOTH, "mixed_bfloat16", **options), out_specs=out)
    plain = on_devices(lambda x: getattr(lax, name)(x, BOTH, **options), out_specs=out)
    x = jnp.ones((16, 8), jnp.bfloat16)
    assert ours.lower(x).as_text() == plain.lower(x).as_text()


@pytest.mark.slow
def test_a_gather_moves_the_compute_dtype_and_its_gradients_the_reduce_dtype():
    weights, batch = jax.random.normal(jax.random.key(0), (8, 4)), jax.random.normal(jax.random.key(1), (8, 8))

    def loss(whole, x):
        return jnp.sum((x.astype(jnp.bfloat16) @ whole.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    def local(w, x):
        return loss(jmp.sharding.all_gather(w, BOTH, POLICY, tiled=True), x)

    fun = on_devices(jax.grad(local))
    assert moved(fun, weights, batch) == [("all_gather", "bf16"), ("reduce_scatter", "f32")]
    expected = jax.grad(loss)(weights, batch)
    # One device sums 8 rows in one bfloat16 gradient; here each of 4 devices rounds its own 2.
    assert np.abs(fun(weights, batch) - expected).max() <= 2.0**-7 * np.abs(expected).max()


def test_a_gather_of_arrays_as_wide_as_the_compute_dtype_casts_nothing():
    for dtype in ("bfloat16", "float16", "int32"):
        gather = on_devices(lambda x: jmp.sharding.all_gather(x, BOTH, POLICY, tiled=True), check_vma=False)
        [(_, shown)] = moved(gather, jax.ShapeDtypeStruct((8,), dtype))
        assert shown == {"bfloat16": "bf16", "float16": "f16", "int32": "i32"}[dtype]


@pytest.mark.parametrize("name", ["psum", "pmean"])
def test_what_is_no_number_passes_by_identity(name):
    key, scale = jax.random.key(0), jmp.DynamicLossScale()
    nothing = np.zeros(3, jax.dtypes.float0)
    seen = {}

    def local(x):
        seen.update(REDUCING[name]({"key": key, "scale": scale, "int": nothing, "none": None}, BOTH, POLICY))
        return x

    on_devices(local).trace(jnp.ones(4))
    assert [seen[name] is given for name, given in {"key": key, "scale": scale, "int": nothing}.items()] == [True] * 3


@pytest.mark.parametrize("name", REDUCING)
def test_devices_agree_on_the_largest_float8_state(name):
    policy = "params=float32,compute=bfloat16,reduce=bfloat16"

    def local(x):
        tree = {"w": jnp.ones((4, 2)), "_overwrite_with_gradient": {"input_amax_history": x}}
        reduced = REDUCING[name](tree, BOTH, policy)
        return reduced["_overwrite_with_gradient"]["input_amax_history"]

    history = jnp.float32([1.001, 5.003, 3.0, 2.0])  # float32 all along: bfloat16 has neither
    assert on_devices(local, out_specs=P())(history).tolist() == [np.float32(5.003)]


@pytest.mark.parametrize("pmean", [jmp.sharding.pmean, functools.partial(jmp.sharding.pmean, policy=POLICY)])
def test_what_is_the_same_along_one_of_several_axes_is_averaged_over_both(pmean):
    """JAX 0.12 refuses such a `lax.pmean`; gradients of parts that were summed along data are of this kind."""

    def local(x):
        grads = {"part": lax.psum(x, "data"), "whole": lax.psum(x, BOTH), "_overwrite_with_gradient": {"a_scale": x}}
        return pmean(grads, axis_name=BOTH)

    mean = on_devices(local, out_specs=P())(jnp.float32([1, 2, 3, 4]))
    assert [mean[name].tolist() for name in ("part", "whole")] == [[5.0], [10.0]]
    assert mean["_overwrite_with_gradient"]["a_scale"].tolist() == [4.0]


@pytest.mark.parametrize("name", [*REDUCING, "all_gather"])
def test_an_axis_that_nothing_maps_is_an_error(name):
    collective = getattr(jmp.sharding, name)
    with pytest.raises(ValueError, match=r"'fsdp' in axis_name is not a mapped axis here. There is no mesh: "):
        collective(jnp.ones(4), "fsdp", POLICY)
    with pytest.raises(ValueError, match=r"'fdsp' in axis_name .* The mesh has 'data', 'fsdp', of which 'data', "):
        on_devices(lambda x: collective(x, ("data", "fdsp"), POLICY)).trace(jnp.ones(4))
    with pytest.raises(ValueError, match=r"'fsdp' in axis_name .* of which 'data' is manual. Name a manual axis, or "):
        on_devices(lambda x: collective(x, "fsdp", POLICY), specs=P("data"), axis_names={"data"}).trace(jnp.ones(4))


def test_a_dimension_that_does_not_divide_is_an_error():
    text = r"Dimension 1 of an array of shape \(1, 6\) is not divisible by the 4 devices along data, fsdp\. Split anot"
    scatter = lambda x: jmp.sharding.psum_scatter(x, BOTH, POLICY, scatter_dimension=1, tiled=True)
    with pytest.raises(ValueError, match=text):
        on_devices(scatter).trace(jnp.ones((4, 6)))
    with pytest.raises(ValueError, match=r"Dimension 0 of an array of shape \(8,\) must equal the number of devices"):
        on_devices(lambda x: jmp.sharding.psum_scatter(x, BOTH, POLICY)).trace(jnp.ones(32))


@pytest.mark.parametrize("name", ["psum_scatter", "all_gather"])
def test_what_is_no_number_cannot_be_scattered_or_gathered(name):
    collect = lambda x: getattr(jmp.sharding, name)(jax.random.split(jax.random.key(0), 4), BOTH, POLICY)
    with pytest.raises(TypeError, match=rf"{name} takes arrays of numbers, got .*key<fry>.* replicate it: P\(\)\."):
        on_devices(collect).trace(jnp.ones(4))


def test_a_map_of_several_reduce_dtypes_is_an_error():
    policy = jmp.PolicyMap({"head": "p=f32,c=bf16,r=f32"}, "mixed_bfloat16")
    with pytest.raises(ValueError, match=r"several dtypes for reduce: float32 and none\. A collective has"):
        jax.vmap(lambda x: jmp.sharding.psum(x, "d", policy), axis_name="d")(jnp.ones(2))
    one = jmp.PolicyMap({"head": "p=f32,c=f32,r=f32"}, "p=f32,c=bf16,r=f32")
    assert jax.vmap(lambda x: jmp.sharding.psum(x, "d", one), axis_name="d")(jnp.ones(2)).tolist() == [2.0, 2.0]
