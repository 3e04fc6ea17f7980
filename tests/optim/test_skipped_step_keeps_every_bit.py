"""Law 14 for every optimizer of optax that has state: a bad step changes nothing but loss scale and counters."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from optax import contrib
from optimizer_registry import LARGE, OPTIMIZERS, WAYS, bits, params_of, types
from properties import examples
from skip_forms import FORMS, forced

import jmp_policy as jmp

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

TALL = jnp.resize(jnp.array([2.0, -0.0]), (LARGE, 1))
TREES = (
    params_of(),
    {"w": jnp.array([[1.0, -0.0], [2.0, 3.0], [-1.5, 0.5]]), "b": jnp.resize(jnp.bfloat16([-0.0, 0.5]), LARGE)},
    {"layers": [{"w": jnp.float16([[0.5, -0.0, 1.0]])}, {"w": TALL}], "b": jnp.float16([3.0])},
)
TREE_OF = {"galore": 1, "mechanize": 0, "selective_transform": 0, "sophia": 0}  # no `None`; or one dtype; others any
OF_EXAMPLES = ("differentially_private_aggregate",)  # gradients have an axis of examples
UPDATED = (
    "MultiSteps", "adafactor", "adamw", "adamw_half_moments", "clip_schedule", "flatten", "inject_hyperparams", "lbfgs",
    "lookahead", "masked", "noisy_sgd", "partition", "reduce_on_plateau", "schedule_free_adamw", "sgd",
    "split_real_and_imaginary",
)  # fmt: skip
CASES = [
    *((name, "step", form) for name in OPTIMIZERS for form in FORMS),
    *((name, "update", "branch") for name in UPDATED),
]

# What optax exports and the registry has not, with the reason.
STATELESS = (
    "adaptive_grad_clip", "add_decayed_weights", "centralize", "clip", "clip_by_block_rms", "clip_by_global_norm",
    "freeze", "fromage", "identity", "keep_params_nonnegative", "normalize", "normalize_by_update_norm", "polyak_sgd",
    "scale", "scale_by_learning_rate", "scale_by_param_block_norm", "scale_by_param_block_rms", "scale_by_polyak",
    "scale_by_sign", "scale_by_trust_ratio", "set_to_zero", "sign_sgd", "stateless", "stateless_with_tree_map",
)  # fmt: skip
PART_OF = {
    "add_noise": "noisy_sgd",
    "chain": "clip_schedule",
    "dpsgd": "differentially_private_aggregate",
    "hutchinson_estimator_diag_hessian": "sophia",
    "multi_transform": "partition",
    "scale_by_belief": "adabelief",
    "scale_by_factored_rms": "adafactor",
    "scale_by_optimistic_gradient": "optimistic_gradient_descent",
    "scale_by_rms": "rmsprop",
    "scale_by_rss": "adagrad",
    "scale_by_schedule": "clip_schedule",
    "scale_by_stddev": "rmsprop",
    "scale_by_zoom_linesearch": "lbfgs",
    "trace": "sgd",
    "with_extra_args_support": "lookahead",
}  # and each `scale_by_x` of x
EXEMPT = {
    "inject_stateful_hyperparams": "deprecated; the same as inject_hyperparams",
    "measure_with_ema": "a measure for monitor, whose updates are no updates",
    "monitor": "its first update changes the tree of its state, which no scan and no branch takes",
    "optimistic_adam": "deprecated; optimistic_adam_v2 is tested",
}
NO_TRANSFORMATIONS = (
    "WrappedSchedule", "bias_correction", "matrix_inverse_pth_root", "schedule_free_eval_params",
    "sigmoid_binary_cross_entropy", "update_infinity_moment", "update_moment", "update_moment_per_elem_norm",
)  # fmt: skip


def _sum_of_squares(params):
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(params))


EXTRA = {
    **dict.fromkeys(("momo", "momo_adam", "reduce_on_plateau"), lambda grads: {"value": jnp.float32(1)}),
    **dict.fromkeys(
        ("lbfgs", "scale_by_backtracking_linesearch"),
        lambda grads: {"value": jnp.float32(1), "grad": grads, "value_fn": _sum_of_squares},
    ),
    "sophia": lambda grads: {"obj_fn": _sum_of_squares},
}


def _params(name):
    tree = TREES[TREE_OF.get(name, len(name) % len(TREES))]
    return optax.LookaheadParams.init_synced(tree) if name == "lookahead" else tree


def _gradients(name, seed, fault):
    """Random gradients, with a number that is not finite in a place of its choice."""
    params = _params(name).fast if name == "lookahead" else _params(name)
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(2, *x.shape) if name in OF_EXAMPLES else x.shape) for x in jax.tree.leaves(params)]
    if fault is not None:
        number, place = fault
        leaf = arrays[place % len(arrays)]
        leaf.flat[place % leaf.size] = number
    leaves = [jnp.asarray(array, like.dtype) for array, like in zip(arrays, jax.tree.leaves(params), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


@functools.cache
def _step_and_start(name, way, form):
    """A jitted step, and the parameters and the state that training starts from."""
    tx = jmp.optim.loss_scaled(OPTIMIZERS[name](), jmp.DynamicLossScale())
    extra = EXTRA.get(name, lambda grads: {})

    def step(grads, state, params):
        with forced(form):
            return WAYS[way](tx, grads, state, params, **extra(grads))

    # LLVM's optimizations, on which nothing here depends, would take a fifth of the time.
    jitted = jax.jit(step, compiler_options={"xla_backend_optimization_level": 0})
    return jitted, _params(name), tx.init(_params(name))


faults = st.tuples(st.sampled_from([np.inf, -np.inf, np.nan]), st.integers(0, 100))


@pytest.mark.parametrize(("name", "way", "form"), CASES)
@given(history=st.lists(st.none() | faults, max_size=3), fault=faults, seed=st.integers(0, 2**32 - 1))
@examples(5)
def test_bad_step_changes_nothing_but_scale_and_counters(name, way, form, history, fault, seed):
    step, params, state = _step_and_start(name, way, form)
    expected_types = types((params, state))
    skipped = consecutive = 0
    for number, bad in enumerate([*history, fault]):
        before = bits((params, state.inner_state))
        params, state = step(_gradients(name, seed + number, bad), state, params)
        skipped, consecutive = (skipped, 0) if bad is None else (skipped + 1, consecutive + 1)
        assert bad is None or bits((params, state.inner_state)) == before
    assert types((params, state)) == expected_types
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (skipped, consecutive)
    assert float(state.loss_scale.loss_scale) == 2.0 ** (15 - skipped)


def _exported():
    """The names in optax of what returns a transformation, or does not say what it returns."""
    for name, value in {**vars(optax), **vars(contrib)}.items():
        if inspect.isfunction(value) and not name.startswith("_"):
            returned = inspect.signature(value).return_annotation
            if returned is inspect.Signature.empty or "GradientTransformation" in str(returned):
                yield name
        elif inspect.isclass(value) and hasattr(value, "update") and not issubclass(value, tuple):
            yield name


def test_every_optimizer_that_optax_exports_is_in_the_registry_or_exempt():
    parts = {f"scale_by_{name}" for name in OPTIMIZERS} | PART_OF.keys()
    known = {*OPTIMIZERS, *parts, *STATELESS, *EXEMPT, *NO_TRANSFORMATIONS}
    assert sorted(set(_exported()) - known) == []
    assert PART_OF.keys() & OPTIMIZERS.keys() == set()
    assert set(PART_OF.values()) <= OPTIMIZERS.keys()


def test_every_optimizer_of_the_registry_has_state():
    for name in OPTIMIZERS:
        assert jax.tree.leaves(jax.eval_shape(OPTIMIZERS[name]().init, _params(name))), name
