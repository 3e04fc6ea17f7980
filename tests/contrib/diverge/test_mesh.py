"""`contrib.diverge` on a mesh of four devices: jit with shardings, and `shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from meshes import make_mesh

from jmp_policy.contrib import diverge

P = jax.P
MESH = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype(np.float32)
PARAMS = {name: RNG.normal(size=(8, 8)).astype(np.float32) / 3 for name in ("encoder", "head")}


def place(x, *spec):
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def constrain(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def normalize(h, average=lambda x: x):
    return h / jnp.sqrt(average(jnp.mean(h**2, 0, keepdims=True)) + 1e-5)


def loss_fn(params, x, normalize=normalize, average=lambda x: x):
    with jax.named_scope("encoder"):
        h = jnp.tanh(x @ params["encoder"])
    with jax.named_scope("norm"):
        h = normalize(h)
    with jax.named_scope("head"):
        return average(jnp.mean((h @ params["head"]) ** 2))


def split_loss_fn(is_bad, params, x):
    """Returns a loss that `shard_map` computes. A bad one normalizes with the statistics of its own shard."""
    mean = functools.partial(lax.pmean, axis_name="data")
    own = functools.partial(normalize, average=(lambda x: x) if is_bad else mean)
    local = functools.partial(loss_fn, normalize=own, average=mean)
    return jax.shard_map(local, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())(params, x)


def list_faulty(divergence):
    assert divergence.unaligned == ()
    rows = sorted(divergence.rows(), key=lambda row: -row.introduced)
    return [row.path for row in rows if row.introduced > 1e-5]


@pytest.mark.slow
def test_data_parallelism_introduces_rounding_only():
    def run_whole(params, x):
        return loss_fn(jax.tree.map(constrain, params), constrain(x))

    divergence = diverge(run_whole, lambda params, x: loss_fn(params, constrain(x, "data")))(PARAMS, place(X))
    assert {row.path for row in divergence.rows()} >= {"encoder", "norm"}
    assert list_faulty(divergence) == []


@pytest.mark.slow
def test_missing_mean_over_devices_in_one_layer_is_named():
    def run_split(params, x):
        own = jax.shard_map(normalize, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
        return loss_fn(params, constrain(x, "data"), own)

    divergence = diverge(loss_fn, run_split)(PARAMS, place(X, "data"))
    assert list_faulty(divergence) == ["norm"]
    h = jnp.tanh(X @ PARAMS["encoder"])
    expected = jnp.concatenate([normalize(part) for part in jnp.split(h, 4)])
    error = np.linalg.norm(expected - normalize(h)) / np.linalg.norm(normalize(h))
    np.testing.assert_allclose(divergence.rows()[1].introduced, error, rtol=1e-4)


def test_scopes_of_two_shard_maps_align_on_each_device():
    f, g = (functools.partial(split_loss_fn, is_bad) for is_bad in (False, True))
    divergence = diverge(f, g)(PARAMS, place(X, "data"))
    assert list_faulty(divergence) == ["norm"]
    row = next(row for row in divergence.rows() if row.path == "norm")
    h = jnp.tanh(X @ PARAMS["encoder"])
    parts = zip(jnp.split(h, 4), jnp.split(normalize(h), 4), strict=True)
    errors = [np.linalg.norm(normalize(own) - part) / np.linalg.norm(part) for own, part in parts]
    np.testing.assert_allclose(row.iterations, errors, rtol=1e-4)


def test_explicit_axes_and_code_in_auto_axes_are_compared():
    mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def loss_of(scale):
        def normalize_rows(h):
            with jax.named_scope("norm"):
                h = h / jnp.sqrt(jnp.mean(h**2, 1, keepdims=True) + 1e-5) * scale
            with jax.named_scope("exp"):
                return jnp.exp(h)

        def loss(params, x):
            with jax.named_scope("encoder"):
                h = jnp.tanh(x @ params["encoder"])
            h = jax.sharding.auto_axes(normalize_rows, out_sharding=P(None, "data"))(h)
            with jax.named_scope("head"):
                return jnp.mean(jax.sharding.reshard(h, P()) @ params["head"])

        return jax.value_and_grad(loss)

    with jax.set_mesh(mesh):
        params = jax.device_put(PARAMS, NamedSharding(mesh, P(None, "data")))
        params["head"] = jax.device_put(PARAMS["head"], NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P()))
        same, scaled = (diverge(loss_of(1.0), loss_of(scale))(params, x) for scale in (1.0, 1.1))
    assert list_faulty(same) == []
    assert list_faulty(scaled) == ["norm", "norm"]
