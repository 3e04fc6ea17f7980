"""GPTQ and AWQ through models: what they round, in which order, and what stays."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calibrated_models import POLICY, ROWS, draw_inputs, linear
from flax import linen as nn, nnx

import jmp_policy as jmp
from jmp_policy import contrib, quant

METHODS = [contrib.gptq, contrib.awq]


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16, name="dense", use_bias=False)(nn.relu(x)), None


class Linen(nn.Module):
    """A scan of two layers, a layer that is called twice, `last` (in `vmap` if `maps`), and a tied table of logits."""

    maps: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(32, 16, name="embed", embedding_init=nn.initializers.normal(1))
        scan = nn.scan(Residual, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = scan(name="blocks")(embed(tokens), None)
        twice = nn.Dense(16, name="twice")
        x = nn.relu(twice(nn.relu(twice(x))))
        mapped = {"variable_axes": {"params": None}, "split_rngs": {"params": False}}
        last = nn.vmap(nn.Dense, **mapped) if self.maps else nn.Dense
        return embed.attend(last(16, name="last")(x))


class Nnx(nnx.Module):
    """Two layers with one weight, and a masked convolution; its inputs are `(..., 2, 8)`."""

    def __init__(self, rngs: nnx.Rngs):
        mask = jnp.ones((3, 8, 16)).at[2].set(0)
        self.first = nnx.LinearGeneral((2, 8), (4, 4), axis=(-2, -1), rngs=rngs)
        self.tied = nnx.LinearGeneral((2, 8), (4, 4), axis=(-2, -1), rngs=rngs)
        self.tied.kernel = self.first.kernel
        self.masked = nnx.Conv(16, 16, (3,), feature_group_count=2, mask=mask, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.first(x)).reshape(*x.shape[:-2], 2, 8)
        return self.masked(nnx.relu(self.tied(x)).reshape(*x.shape[:-2], 16))


def read_shares(text):
    """Reads the path of each matrix that was rounded, and its share of the error of nearest."""
    lines = text.splitlines()
    shares = [float(line.split(": ")[2].split()[0]) for line in lines]
    return [line.split(", ")[1].split(":")[0] for line in lines], shares


@pytest.mark.slow
@pytest.mark.parametrize("calibrate", METHODS)
def test_linen_models_are_rounded_matrix_by_matrix_into_the_storage_of_quantize(calibrate, capsys, tmp_path):
    model, tokens = Linen(maps=True), list(jax.random.randint(jax.random.key(0), (2, 3, 40), 0, 32))
    variables = jax.jit(model.init)(jax.random.key(1), tokens[0])
    policied, file = jmp.with_policy(model, POLICY), tmp_path / "matrices.jsonl"
    options = {"stacked": ["blocks"], "file": file, "progress": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = calibrate(policied, tokens, variables=variables, **options)
        paths, shares = read_shares(capsys.readouterr().err)
        whole = file.read_text()
        file.write_text(whole[: whole.rindex('{"matrix"') + 30])  # an interrupted run goes on where it stopped
        again = calibrate(policied.bind(variables), tokens, **options)
    message = f"{calibrate.__name__} rounds 'last/kernel' to nearest and cannot read their inputs"
    assert {(str(one.message).partition(":")[0], one.filename) for one in caught} == {(message, __file__)}
    assert paths == ["blocks/dense/kernel"] * 2 + ["twice/kernel"]
    assert max(shares) < 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert file.read_text() == whole
    jax.tree.map(np.testing.assert_array_equal, again, made)

    nearest = quant.quantize(variables, POLICY, stacked=["blocks"])
    is_stored = lambda node: isinstance(node, quant.QuantizedArray)
    remove = lambda node: dataclasses.replace(node, input_scale=None) if is_stored(node) else node
    stored = jax.tree.map(remove, made, is_leaf=is_stored)
    assert jax.tree.structure(stored) == jax.tree.structure(nearest)
    assert jax.tree.map(jnp.shape, stored) == jax.tree.map(jnp.shape, nearest)
    same = jax.tree.map(lambda x, y: bool((x == y).all()), stored, nearest)["params"]
    assert all(jax.tree.leaves([same["embed"], same["last"]]))
    assert not same["twice"]["kernel"].values
    expected = model.apply(variables, tokens[0])
    errors = [jnp.linalg.norm(policied.apply(one, tokens[0]) - expected) for one in (made, nearest)]
    assert errors[0] < errors[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calibrate", "policy"),
    [(contrib.gptq, "int8(min_size=0)_from_float32"), (contrib.awq, "int4/4(min_size=0)_from_float32")],
)
def test_nnx_models_stay_tied_and_masked(calibrate, policy, capsys):
    model = Nnx(nnx.Rngs(0))
    x = jnp.asarray(2 * draw_inputs(16, 240).reshape(2, 8, 15, 2, 8))
    policied = jmp.with_policy(model, policy)
    made = calibrate(policied, list(x), progress=True)
    _, shares = read_shares(capsys.readouterr().err)
    assert len(shares) == 2
    assert max(shares) < 1
    assert made.first.kernel is made.tied.kernel
    assert not made.masked.kernel[...].dequantize()[2].any()
    assert made.masked.kernel[...].dequantize()[:2].all(axis=0).any()
    assert isinstance(model.first.kernel, nnx.Param)


@pytest.mark.slow
@pytest.mark.parametrize("calibrate", METHODS)
def test_rounding_is_in_float32_under_x64(calibrate):
    rows = jnp.asarray(draw_inputs(16))
    made = calibrate(linear(), [rows]).kernel[...]
    with jax.enable_x64(True):
        again = calibrate(linear(), [rows]).kernel[...]
    assert jax.tree.map(lambda x: x.dtype, made) == jax.tree.map(lambda x: x.dtype, again)


NAN, UNROUNDED = ROWS.at[1, 3].set(jnp.nan), nnx.Linear(16, 16, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("args", "options", "error", "text"), [
    ((linear(), []), {}, ValueError, r"^NAME was given no batches\. For example: NAME\(model, \[x\]"),
    ((linear(), ROWS), {}, TypeError, r"^NAME takes a list of batches, got an array of shape \(2, 16\)\. "
     r"Pass a list of batches: \[x\]\. For example: NAME\(model, \[x\]"),
    ((UNROUNDED, [ROWS]), {}, ValueError,
     r"^NAME quantizes by the policy of a model, and .* has none\. For example: NAME\(with_policy\(model, 'int4_from"),
    ((linear("mxfp8/16(min_size=0)_from_float32"), [ROWS]), {}, ValueError,
     r"^NAME rounds to int4 and int8, and the weight 'kernel' has the format 'mxfp8/16\(min_size=0\)'"),
    ((linear(), [NAN]), {}, ValueError, r"^The inputs of the weight 'kernel' are not all finite, .* so NAME cannot"),
    ((linear(), [ROWS]), {"clip": "best"}, ValueError, r"^clip is 'absmax', 'mse' or a percentile"),
])  # fmt: skip
def test_what_neither_rounds_is_an_error(args, options, error, text):
    for calibrate in METHODS:
        with pytest.raises(error, match=text.replace("NAME", calibrate.__name__)):
            calibrate(*args, **options)
