"""In a loop written by hand, one line keeps the batch statistics of a skipped step from advancing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jmp_policy as jmp

X = jax.random.normal(jax.random.key(0), (8, 3))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(4)(x))
        return nn.Dense(1)(x)


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def loop():
    """A jitted step of a loop with the line, which also returns the statistics of a loop without, and a state."""
    with jax.numpy_dtype_promotion("standard"):
        model = jmp.with_policy(Net(), "params=float32,compute=float16,output=float32")
        variables = jax.jit(model.init)(jax.random.key(1), X)
        tx = jmp.optim.loss_scaled(optax.adam(1e-2), jmp.DynamicLossScale(2.0**8))

        @jax.jit
        def step(variables, opt_state, x):
            params, stats = variables["params"], variables["batch_stats"]

            def loss_fn(params):
                out, updated = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
                return jnp.mean((out - 1.0) ** 2), updated["batch_stats"]

            (_, new_stats), grads = jmp.value_and_grad(loss_fn, has_aux=True, loss_scale=opt_state)(params)
            params, opt_state = jmp.optim.step(tx, grads, opt_state, params)
            kept = jmp.select_tree(opt_state.grads_finite, new_stats, stats)
            return {"params": params, "batch_stats": kept}, opt_state, new_stats

        variables, opt_state, _ = step(variables, tx.init(variables["params"]), X)
    return step, variables, opt_state


def too_high(opt_state):
    return opt_state._replace(loss_scale=jmp.DynamicLossScale(2.0**24))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil_batch", "spoil_state"),
    [(lambda x: x.at[0, 0].set(jnp.inf), lambda state: state), (lambda x: x, too_high)],
    ids=["an infinite input", "a loss scale that is too high"],
)
def test_one_line_keeps_batch_statistics_on_a_skipped_step_and_without_it_they_advance(loop, spoil_batch, spoil_state):
    step, before, opt_state = loop
    after, skipped, naive = step(before, spoil_state(opt_state), spoil_batch(X))
    assert not skipped.grads_finite
    jax.tree.map(np.testing.assert_array_equal, (after, skipped.inner_state), (before, opt_state.inner_state))
    # What the imagenet example of Flax keeps: with an infinite input the statistics are lost for ever.
    changed = jax.tree.map(lambda new, old: bool((new != old).any()), naive, before["batch_stats"])
    assert all(jax.tree.leaves(changed))


@pytest.mark.slow
def test_batch_statistics_of_a_good_step_advance(loop):
    step, before, opt_state = loop
    after, taken, naive = step(before, opt_state, X)
    assert taken.grads_finite
    jax.tree.map(np.testing.assert_array_equal, after["batch_stats"], naive)
    assert all(jax.tree.leaves(jax.tree.map(lambda new, old: bool((new != old).any()), naive, before["batch_stats"])))
