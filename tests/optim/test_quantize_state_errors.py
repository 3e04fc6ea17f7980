"""What `quantize_state` refuses, and what it leaves as it is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from quantized_moments import make_params

from jmp_policy import optim

PARAMS = {"w": jnp.ones((64, 24)), "b": jnp.ones(24)}

REFUSED = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.adam(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "muon": lambda: contrib.muon(1e-2),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.1, 0), optax.adam(1e-2)),
    "novograd": lambda: optax.novograd(1e-2),
    "prodigy": lambda: contrib.prodigy(),
    "sm3": lambda: optax.sm3(1e-2),
}
NAMED = {
    "lamb": "reduce_sum at .*optax",
    "muon": "reshape|dot_general|transpose",
    "clip_by_global_norm": "reduce_sum at",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_elementwise_is_refused_and_named(name):
    tx = optim.quantize_state(REFUSED[name](), min_size=500)
    with pytest.raises(ValueError, match=r"^quantize_state runs an optimizer on one chunk of a parameter") as caught:
        jax.eval_shape(tx.update, PARAMS, tx.init(PARAMS), PARAMS)
    said = str(caught.value)
    assert re.search(rf"is not elementwise: .*({NAMED.get(name, '')})", said), said
    assert "optax.chain(optax.clip_by_global_norm(1.0), quantize_state(optax.adamw(1e-3)))" in said
    assert said.endswith("quantize_state(tx, elementwise=False).")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "clip_by_global_norm"])
def test_what_is_not_elementwise_runs_on_whole_moments_if_asked(name):
    tx = optim.quantize_state(REFUSED[name](), min_size=500, elementwise=False)
    state = tx.init(PARAMS)
    _, new = jax.jit(tx.update)(PARAMS, state, PARAMS)
    _, wide = REFUSED[name]().update(PARAMS, REFUSED[name]().init(PARAMS), PARAMS)
    mu = optax.tree_utils.tree_get(new, "mu")
    assert mu["w"].dtype == jnp.uint8
    np.testing.assert_allclose(mu["b"], optax.tree_utils.tree_get(wide, "mu")["b"], rtol=1e-6)


def test_a_missing_argument_is_what_the_optimizer_says_itself():
    tx = optim.quantize_state(optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau()), min_size=500)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'value'"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    tx = optim.quantize_state(optax.adamw(1e-2), min_size=500)
    with pytest.raises(ValueError, match="params"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_wrong_settings_are_errors():
    adam = optax.adam(1e-2)
    with pytest.raises(ValueError, match=r"^bits must be 8, got 4\. For example: quantize_state\(optax"):
        optim.quantize_state(adam, bits=4)
    for block_size in (0, 100, 8, 8192, 256.0, "256"):
        text = (
            rf"^block_size must be a power of two from 16 to 4096, got .*{block_size}.*\. For example: block_size=256"
        )
        with pytest.raises(ValueError, match=text):
            optim.quantize_state(adam, block_size=block_size)
    with pytest.raises(TypeError, match=r"adam"):
        optim.quantize_state(optax.adam)
    with pytest.raises(ValueError, match=r"quantize_state goes inside of"):
        optim.quantize_state(optim.kahan(adam))
    with pytest.raises(TypeError, match=r"stochastic .*key.*got 3"):
        optim.quantize_state(adam, stochastic=3)
    with pytest.raises(TypeError, match=r"stochastic .*key"):
        optim.quantize_state(adam, stochastic=jax.random.split(jax.random.key(0), 3))


def test_an_optimizer_without_moments_is_an_error():
    with pytest.raises(
        ValueError, match=r"is for optimizers with moments, but the state of this one has none\. For ex"
    ):
        optim.quantize_state(optax.sgd(1e-2)).init(PARAMS)
    for inner in (contrib.galore(1e-2, rank=1), optax.flatten(optax.adam(1e-2))):
        with pytest.raises(ValueError, match=r"found no moments with the shape of a parameter: 'w'\. It is for .* For"):
            optim.quantize_state(inner, min_size=500).init(PARAMS)


def test_patterns_that_match_nothing_or_are_none_are_errors():
    with pytest.raises(
        ValueError, match=r"^where='blocks' matches no parameter of 'b', 'w'\. A pattern matches a whole"
    ):
        optim.quantize_state(optax.adam(1e-2), where="blocks").init(PARAMS)
    with pytest.raises(ValueError, match=r"^where=\['w', '\('\] contains an invalid regular expression: .* For"):
        optim.quantize_state(optax.adam(1e-2), where=["w", "("])
    with pytest.raises(ValueError, match=r"^where=3 contains an invalid regular expression"):
        optim.quantize_state(optax.adam(1e-2), where=3)


def test_the_state_of_another_optimizer_is_an_error():
    tx = optim.quantize_state(optax.adam(1e-2), min_size=500)
    with pytest.raises(
        TypeError, match=r"^Expected the state of quantize_state, got tuple\. Make one: tx\.init\(params\)"
    ):
        tx.update(PARAMS, optax.adam(1e-2).init(PARAMS), PARAMS)


@pytest.mark.slow
def test_what_blocks_do_not_fit_small_ones_embeddings_and_integers_are_left():
    params = make_params() | {"steps": jnp.ones((64, 64), jnp.int32), "none": None}
    params |= {"wte": jnp.ones((64, 16)), "my_Embedding": {"table": jnp.ones((64, 16))}, "empty": jnp.ones((0, 64))}
    state = optim.quantize_state(optax.trace(0.9), min_size=500).init(params)
    paths = jax.tree_util.tree_leaves_with_path(state.inner_state.trace)
    assert {jax.tree_util.keystr(path) for path, x in paths if x.dtype == jnp.uint8} == {"['w']", "['blocks']['v']"}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("w", {"w"}),
        ("blocks", {"blocks/v"}),
        (["blocks/.*", "embed"], {"blocks/v", "embed"}),
        (lambda path, param: param.shape == (64, 16) or path == "w", {"embed", "w"}),
    ],
)
def test_a_rule_chooses_by_path(where, expected):
    state = optim.quantize_state(optax.trace(0.9), min_size=500, where=where).init(make_params())
    paths = jax.tree_util.tree_leaves_with_path(state.inner_state.trace)
    found = {jax.tree_util.keystr(path, simple=True, separator="/") for path, x in paths if x.dtype == jnp.uint8}
    assert found == expected


def test_blocks_have_the_size_that_was_asked_for():
    for block_size, shape in ((16, (4, 24)), (256, (2, 3)), (1024, (1, 3))):
        tx = optim.quantize_state(optax.trace(0.9), block_size=block_size, min_size=500)
        assert tx.init({"w": jnp.ones((64, 24))}).scales[0]["w"].shape == shape
