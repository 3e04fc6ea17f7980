"""`contrib.parity` with samplers of Flax, in 8 bits, on several devices, and recorded."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType, NamedSharding
from language_model import HALF, Options, make_cache, make_loop, make_params, make_step, make_tokens, make_trainer
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy.contrib import parity, record

PARAMS, TOKENS = make_params(), make_tokens()
LOW = "params=float32,compute=bfloat16,output=float32"


class Decoder(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(24, 16, name="embed")(tokens)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        h = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(2, decode=self.decode, name="attention")(h, mask=mask)
        x = x + nn.Dense(16, name="down")(nn.gelu(nn.Dense(32, name="up")(x)))
        return nn.Dense(24, name="head")(x)


VARIABLES = Decoder().init(jax.random.key(0), TOKENS)


def compare_linen(trainer_policy, sampler_policy, variables=VARIABLES, quantized=None):
    model = jmp.with_policy(Decoder(), trainer_policy)
    decoder = jmp.with_policy(Decoder(decode=True), sampler_policy)
    cache = decoder.init(jax.random.key(0), TOKENS)["cache"]

    def step(variables, cache, token):
        given = variables if quantized is None else quantized
        logits, changed = decoder.apply({**given, "cache": cache}, token[:, None], mutable=["cache"])
        return logits, changed["cache"]

    return parity(model.apply, step, cache=cache)(variables, TOKENS)


@pytest.mark.slow
def test_linen_decoder_under_a_map_has_one_guilty_module():
    found = compare_linen("float32", jmp.PolicyMap({"up": LOW}, "float32"))
    first, second = found.rows()[:2]
    assert (first.path, first.dtype) == ("up", "bfloat16 → float32")
    assert first.introduced > 1000 * second.introduced
    assert (found.causes, found.unaligned) == ((), ())


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote their own float32 statistics
        yield


@pytest.mark.slow
def test_int8_sampler_beside_a_bfloat16_trainer():
    policy = f"int8(min_size=0)_from_{LOW}"
    quantized = jmp.quant.quantize(VARIABLES, policy)
    found = compare_linen(LOW, policy, quantized=quantized)
    assert found.causes == ()
    assert found.unaligned == ()
    by_path = {row.path: row for row in found.rows()}
    assert {name for name, row in by_path.items() if row.introduced > 0.004} >= {"up", "down", "head"}
    assert by_path["head"].dtype == "int8 → bfloat16"
    assert found.mean > compare_linen(LOW, LOW).mean


@pytest.mark.slow
def test_cache_in_8_bits_by_policy():
    found = compare_linen("float32", "params=float32,compute=float32,output=float32,cache=int8")
    first, second = found.rows()[:2]
    assert (first.path, found.causes, found.unaligned) == ("attention/out", (), ())
    assert 1e-3 < first.introduced < 0.03
    assert second.introduced < 1e-6


@pytest.mark.slow
def test_nnx_model_is_an_argument():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(24, 16, rngs=rngs)
            self.up = nnx.Linear(16, 16, rngs=rngs)
            self.head = nnx.Linear(16, 24, rngs=rngs)

        def __call__(self, tokens, total, dtype=jnp.float32):
            x = self.embed(tokens)
            total = total + x if x.ndim == 2 else total + jnp.cumsum(x, 1)
            h = nnx.gelu(self.up(total)).astype(dtype).astype(jnp.float32)
            return self.head(h), total

    model = Model(nnx.Rngs(0))
    trainer = lambda model, tokens: model(tokens, 0.0)[0]

    def sampler(model, tokens):
        total, logits = jnp.zeros((tokens.shape[0], 16)), []
        for token in tokens.T:
            made, total = model(token, total, HALF)
            logits.append(made)
        return jnp.stack(logits, 1)

    found = parity(trainer, sampler)(model, TOKENS)
    assert found.rows()[0].path in ("up", "head")
    assert 1e-4 < found.rows()[0].introduced < 1e-2
    assert (found.causes, found.unaligned) == ((), ())


class NnxDecoder(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.norm = nnx.Embed(24, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.head = nnx.Linear(16, 24, rngs=rngs)

    def __call__(self, tokens, decode=False):
        x = self.embed(tokens)
        mask = None if decode else nnx.make_causal_mask(tokens)
        x = x + self.attention(self.norm(x), mask=mask, decode=decode)
        return self.head(x.astype(HALF if decode else x.dtype).astype(jnp.float32))

    def decode_in_python(self, tokens):
        self.attention.init_cache((*tokens.shape, 16))
        return jnp.concatenate([self(token[:, None], decode=True) for token in tokens.T], 1)

    def decode_in_scan(self, tokens):
        self.attention.init_cache((*tokens.shape, 16))
        step = nnx.scan(lambda model, token: (model, model(token[:, None], decode=True)[:, 0]))
        return step(self, tokens.T)[1].swapaxes(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("decode", [NnxDecoder.decode_in_python, NnxDecoder.decode_in_scan])
def test_cache_of_nnx_attention(decode):
    found = parity(lambda model, tokens: model(tokens), decode)(NnxDecoder(nnx.Rngs(0)), TOKENS)
    first, *others = found.rows()
    assert (first.path, found.causes, found.unaligned) == ("head", (), ())
    assert 1e-4 < first.introduced < 1e-2
    assert len(first.iterations) == TOKENS.shape[1]
    assert {row.path for row in others} > {"embed", "norm", "attention/query", "attention/out"}
    assert max(row.introduced for row in others) < 1e-6


MESH = make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
SPECS = {"query": (None, "model"), "key": (None, "model"), "value": (None, "model"), "out": ("model",)}
SPECS |= {"head": (None, "model"), "experts": ("model",)}
SHARDED = {
    name: jax.device_put(leaf, NamedSharding(MESH, jax.P(*SPECS.get(name, ())))) for name, leaf in PARAMS.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("is_committed", [False, True])
def test_tensor_parallel_sampler_beside_a_trainer_on_one_device(is_committed):
    step = make_step(Options(head_dtype=HALF), weights=SHARDED)
    params = jax.device_put(PARAMS, jax.devices()[0]) if is_committed else PARAMS
    found = parity(make_trainer(), step, cache=make_cache())(params, TOKENS)
    first, second = found.rows()[:2]
    assert (first.path, found.causes, found.unaligned) == ("head", (), ())
    assert first.introduced > 1000 * second.introduced


@pytest.mark.slow
def test_a_sum_over_devices_in_half_precision_is_found():
    def multiply(x, weight):
        return jax.lax.psum((x @ weight).astype(HALF), "model").astype(jnp.float32)

    specs = {"in_specs": (jax.P(None, None, "model"), jax.P("model")), "out_specs": jax.P()}
    on_devices = jax.shard_map(multiply, mesh=MESH, **specs)

    def model(params, tokens, multiply):
        with jax.named_scope("embed"):
            x = params["embed"][tokens]
        with jax.named_scope("out"):
            x = multiply(x, params["out"])
        with jax.named_scope("head"):
            return jnp.cumsum(x, 1) @ params["head"]

    sampler = functools.partial(model, multiply=on_devices)
    found = parity(functools.partial(model, multiply=jnp.matmul), sampler)(SHARDED, TOKENS)
    first, second = found.rows()[:2]
    assert (first.path, found.causes) == ("out", ())
    assert first.introduced > 1000 * second.introduced


@pytest.mark.slow
def test_recording_of_another_framework_with_other_names(tmp_path):
    values = record(make_loop(Options(head_dtype=HALF)))(PARAMS, TOKENS)
    names = {"lm_head": "head", "logits": "result"}
    other = {new: old for old, new in names.items()}

    def rename(name):
        path, separator, number = name.partition(":")
        return other.get(path, path) + separator + number

    file = tmp_path / "recording.npz"
    np.savez(file, **{rename(name): value for name, value in values.items()})
    found = parity(make_trainer(), file, names=names)(PARAMS, TOKENS)
    assert (found.rows()[0].path, found.unaligned) == ("head", ())
    loop = parity(make_trainer(), make_loop(Options(head_dtype=HALF)))(PARAMS, TOKENS)
    np.testing.assert_allclose(found.rows()[0].iterations, loop.rows()[0].iterations, rtol=1e-3)
    np.testing.assert_allclose(found.mean, loop.mean, rtol=1e-2)


@pytest.mark.slow
def test_report_is_pickled_without_its_functions():
    found = parity(make_trainer(), make_step(Options(head_dtype=HALF)), cache=make_cache(), scopes=False)(
        PARAMS, TOKENS
    )
    again = pickle.loads(pickle.dumps(found))
    assert str(again) == str(found)
    with pytest.raises(ValueError, match=r"^A pickled Parity has no functions to run. For example: parity\(trainer, "):
        again.policy_map(0.1)
