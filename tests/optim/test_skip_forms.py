"""A step is skipped by a branch or by a select, as the platform has it: both keep every bit, and take equal steps."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from half_parameter_registry import METHODS
from jax.sharding import NamedSharding, PartitionSpec as P
from optimizer_registry import WAYS, bits
from skip_forms import FORMS, forced

import jmp_policy as jmp

STEPS = 200
RATE = 0.2  # of steps that are not finite


@pytest.fixture(params=FORMS)
def form(request):
    with forced(request.param):
        yield request.param


def _all_bits():
    """Every number of half precision, and random ones of float32: subnormals, infinities and nans with payloads."""
    halves, words = np.arange(2**16, dtype=np.uint16), np.random.default_rng(0).integers(2**32, size=2**16)
    words = np.concatenate([words, [0x80000000, 1, 0x7F800001, 0xFFC12345, 0x7F800000]]).astype(np.uint32)
    words.resize(2**16 + 8)
    return {"f32": words.view(np.float32), "bf16": halves.view(jnp.bfloat16), "f16": halves.view(np.float16)}


def _bad(params, number=np.nan):
    """Gradients like the parameters, all zero but for one number."""
    grads = jax.tree.map(np.zeros_like, params)
    grads["f32"].reshape(-1)[5] = number
    return jax.tree.map(jnp.asarray, grads)


def _state_of_any_bits(tx, params):
    """A state whose arrays hold any bits, too."""
    state = tx.init(jax.tree.map(jnp.asarray, params))
    fill = lambda x: jnp.asarray(np.resize(params["f32"], x.shape)) if x.dtype == jnp.float32 and x.ndim else x
    return state._replace(inner_state=jax.tree.map(fill, state.inner_state))


def _skip(tx, way="step", grads=None, **options):
    return jax.jit(lambda grads, state, params: WAYS[way](tx, grads, state, params), **options)


SGD = functools.partial(optax.sgd, 0.1, momentum=0.9)


class TestASkippedStepKeepsEveryBit:
    """Of parameters and of state that may hold any."""

    @pytest.mark.slow
    @pytest.mark.parametrize("inner", [SGD, lambda: optax.MultiSteps(SGD(), 2)], ids=["sgd", "MultiSteps"])
    @pytest.mark.parametrize("donated", [(), (1, 2)], ids=["kept", "donated"])
    def test_under_jit(self, form, inner, donated):
        params, tx = _all_bits(), jmp.optim.skip_nonfinite(inner())
        state = _state_of_any_bits(tx, params)
        before = bits((params, state.inner_state))
        device_params = jax.tree.map(jnp.array, params)
        new_params, new_state = _skip(tx, donate_argnums=donated)(_bad(params), state, device_params)
        assert bits((new_params, new_state.inner_state)) == before

    @pytest.mark.slow
    def test_eagerly(self, form):
        params, tx = _all_bits(), jmp.optim.skip_nonfinite(SGD())
        state = _state_of_any_bits(tx, params)
        new_params, new_state = jmp.optim.step(tx, _bad(params, np.inf), state, jax.tree.map(jnp.asarray, params))
        assert bits((new_params, new_state.inner_state)) == bits((params, state.inner_state))

    @pytest.mark.slow
    def test_by_update_and_apply_but_for_subnormals_and_nans(self, form):
        """Updates are added, which makes a nan quiet."""
        params, tx = _all_bits(), jmp.optim.skip_nonfinite(SGD())
        is_normal = lambda x: np.abs(x.astype(np.float32)) >= float(jnp.finfo(x.dtype).tiny)
        params = {name: np.where(is_normal(x), x, np.full_like(x, -0.0)) for name, x in params.items()}
        state = _state_of_any_bits(tx, params)
        new_params, new_state = _skip(tx, "update")(_bad(params), state, params)
        assert bits((new_params, new_state.inner_state)) == bits((params, state.inner_state))

    @pytest.mark.slow
    def test_under_scan(self, form):
        params, tx = _all_bits(), jmp.optim.skip_nonfinite(SGD())
        state = _state_of_any_bits(tx, params)
        grads = jax.tree.map(lambda *x: jnp.stack(x), *[_bad(params, number) for number in (np.inf, np.nan, -np.inf)])

        @jax.jit
        def train(grads, state, params):
            body = lambda carry, grads: (jmp.optim.step(tx, grads, carry[1], carry[0]), None)
            return jax.lax.scan(body, (params, state), grads)[0]

        new_params, new_state = train(grads, state, params)
        assert bits((new_params, new_state.inner_state)) == bits((params, state.inner_state))
        assert int(new_state.skipped_steps) == 3

    @pytest.mark.slow
    def test_under_vmap_each_example_decides_for_itself(self, form):
        params, tx = _all_bits(), jmp.optim.skip_nonfinite(SGD())
        if form == "branch":
            # JAX makes it a select of bfloat16, which XLA:CPU makes one of float32: a nan loses its payload.
            words = params["bf16"].view(np.uint16)
            params["bf16"] = np.where((words & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), words).view(jnp.bfloat16)
        twice = lambda tree: jax.tree.map(lambda x: np.stack([x, x]), tree)  # numpy's, which keeps every bit
        state = _state_of_any_bits(tx, params)
        grads = jax.tree.map(lambda bad, good: jnp.stack([bad, good]), _bad(params), _bad(params, 1.0))
        step = lambda grads, state, params: jmp.optim.step(tx, grads, state, params)
        new_params, new_state = jax.jit(jax.vmap(step))(grads, twice(state), twice(params))
        first, second = (
            jax.tree.map(lambda x, i=i: np.asarray(x)[i], (new_params, new_state.inner_state)) for i in range(2)
        )
        assert bits(first) == bits((params, state.inner_state))
        assert bits(second) != bits((params, state.inner_state))
        assert new_state.skipped_steps.tolist() == [1, 0]

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["sharded", "shard_map"])
    def test_on_two_devices(self, form, kind):
        """Only one device sees the number that is not finite."""
        params = _all_bits()
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
        on_mesh = lambda tree: jax.tree.map(lambda x: jax.device_put(x, _sharding(mesh, x)), tree)
        tx = jmp.optim.skip_nonfinite(SGD(), axis_name="x" if kind == "shard_map" else None)
        state = _state_of_any_bits(tx, params)
        step = lambda grads, state, params: jmp.optim.step(tx, grads, state, params)
        args = on_mesh((_bad(params), state, params))
        if kind == "shard_map":
            specs = jax.tree.map(lambda x: x.sharding.spec, args)
            step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(specs[2], specs[1]))
        new_params, new_state = jax.jit(step)(*args)
        assert bits((new_params, new_state.inner_state)) == bits((params, state.inner_state))
        assert int(new_state.skipped_steps) == 1
        assert new_params["f32"].sharding.spec == P("x")


def _sharding(mesh, x):
    return NamedSharding(mesh, P("x") if jnp.ndim(x) else P())


ADAMW = functools.partial(optax.adamw, 1e-2)
OPTIMIZERS = {
    "adamw": ADAMW,
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), ADAMW()),
    **{name: lambda method=method: method(ADAMW()) for name, method in METHODS.items()},
    # Two programs, in which XLA:CPU fuses other multiplications with additions: steps that are exact either way.
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.5), 2),
    "split": lambda: METHODS["split"](optax.sgd(0.5)),
}
SIZE = 4100  # from some 4,096 numbers on, XLA:CPU reduces in another way


def _history(name, form):
    """The bits of parameters and state after each of 200 random steps, of which one in five is not finite."""
    rng = np.random.default_rng(7)
    dtype = jnp.bfloat16 if name in METHODS else jnp.float32
    grads = (np.round(rng.normal(size=(STEPS, SIZE)) * 16) / 16).astype(np.float32)
    bad = np.flatnonzero(rng.random(STEPS) < RATE)
    grads[bad, rng.integers(SIZE, size=bad.size)] = rng.choice([np.inf, -np.inf, np.nan], bad.size)
    params = {"w": jnp.asarray(rng.normal(size=SIZE), dtype)}
    with forced(form):
        tx = jmp.optim.loss_scaled(OPTIMIZERS[name](), jmp.DynamicLossScale(period=10))
        step = jax.jit(lambda grads, state, params: jmp.optim.step(tx, grads, state, params))
        state, seen = tx.init(params), []
        for grad in grads:
            params, state = step({"w": jnp.asarray(grad, dtype)}, state, params)
            seen.append(bits((params, state)))
    assert int(state.skipped_steps) == bad.size > 20
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_select_and_branch_take_the_same_two_hundred_steps(name):
    branch, select = (_history(name, form) for form in FORMS)
    assert branch == select


PARAMS = {"w": jnp.ones((8, 8))}


class TestEachPlatformGetsItsForm:
    """As the StableHLO of an export has it. What lowering itself makes are cases of an integer constant."""

    def _export(self, step, *args, platforms):
        return jax.export.export(jax.jit(step), platforms=platforms)(*args)

    def _forms(self, tx, grads, params):
        args = (grads, tx.init(params), params)
        step = lambda grads, state, params: jmp.optim.step(tx, grads, state, params)
        one = {name: self._export(step, *args, platforms=[name]) for name in ("cpu", "cuda", "rocm", "tpu")}
        return {name: "branch" if _branches(exported.mlir_module()) else "select" for name, exported in one.items()}

    @pytest.mark.slow
    def test_of_float32_gradients(self):
        forms = self._forms(jmp.optim.skip_nonfinite(ADAMW()), PARAMS, PARAMS)
        assert forms == {"cpu": "branch", "cuda": "select", "rocm": "select", "tpu": "select"}

    @pytest.mark.slow
    @pytest.mark.parametrize("name", METHODS)
    def test_of_half_precision_parameters(self, name):
        half = jmp.cast_floating(PARAMS, jnp.bfloat16)
        forms = self._forms(jmp.optim.skip_nonfinite(METHODS[name](ADAMW())), PARAMS, half)
        assert forms == {"cpu": "branch", "cuda": "select", "rocm": "select", "tpu": "branch"}

    def test_of_update(self):
        tx = jmp.optim.skip_nonfinite(ADAMW())
        for platform, branches in {"cpu": True, "cuda": False, "tpu": False}.items():
            exported = self._export(tx.update, PARAMS, tx.init(PARAMS), PARAMS, platforms=[platform])
            assert bool(_branches(exported.mlir_module())) == branches

    @pytest.mark.slow
    def test_of_minimize_from_half_precision_gradients(self):
        tx = jmp.optim.loss_scaled(ADAMW(), jmp.DynamicLossScale())
        loss = lambda params, x: jnp.sum((x @ params["w"].astype(jnp.float16)).astype(jnp.float32) ** 2)
        args = (PARAMS, tx.init(PARAMS), jnp.ones((2, 8), jnp.float16))
        for platform, branches in {"cpu": True, "cuda": False, "tpu": True}.items():
            exported = self._export(jmp.optim.minimize(loss, tx), *args, platforms=[platform])
            assert bool(_branches(exported.mlir_module())) == branches

    @pytest.mark.slow
    def test_in_an_export_for_all_of_them(self):
        tx = jmp.optim.skip_nonfinite(SGD())
        step = lambda grads, state, params: jmp.optim.step(tx, grads, state, params)
        args = (PARAMS, tx.init(PARAMS), PARAMS)
        exported = self._export(step, *args, platforms=["cpu", "cuda", "tpu"])
        text = exported.mlir_module()
        assert len(_branches(text)) == 1
        selects = re.findall(r"stablehlo\.select .*tensor<i1>, tensor<8x8xf32>", text)
        assert len(selects) == 2  # of w and of its trace
        assert bits(exported.call(*args)) == bits(jax.jit(step)(*args))


@pytest.mark.slow
def test_a_step_that_may_be_skipped_has_derivatives():
    """All forms are traced, whatever the platform."""
    tx = jmp.optim.skip_nonfinite(SGD())
    grads = {"w": jnp.full((2, 3), 2.0)}

    def loss(rate):
        params = {"w": jnp.ones((2, 3))}
        scaled = jax.tree.map(lambda g: rate * g, grads)
        return jnp.sum(jmp.optim.step(tx, scaled, tx.init(params), params)[0]["w"])

    np.testing.assert_allclose(jax.grad(loss)(0.5), -0.1 * 2.0 * 6, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(loss, (0.5,), (1.0,))[1], -0.1 * 2.0 * 6, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(loss))(jnp.ones(2)), [-1.2, -1.2], rtol=1e-6)


def _branches(text):
    """The cases that depend on a predicate."""
    predicates = re.findall(r"(%\w+) = stablehlo\.convert %\w+ : \(tensor<i1>\) -> tensor<i32>", text)
    return [name for name in re.findall(r'"stablehlo\.case"\((%\w+)\)', text) if name in predicates]
