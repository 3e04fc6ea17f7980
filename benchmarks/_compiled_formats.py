"""The 8- and 4-bit programs of the tables of `benchmarks.compiled`, with qwix's beside ours."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

import jmp_policy as jmp
from benchmarks._compiled_steps import Entry, Row
from benchmarks._float8_contestants import BFLOAT16, CONTESTANTS, MODELS, OURS, Case
from benchmarks._loss import cross_entropy
from benchmarks._models_linen import HandGPT
from benchmarks._programs import Program
from benchmarks._quant_contestants import LAYERS, Scheme
from examples.gpt.gpt_linen import GPT
from examples.gpt.model import GPTConfig
from jmp_policy import quant


def _with_blocks(format: str, made: type[linen.Module]) -> linen.Module:
    """With jmp_policy, small layers as well, as the others."""
    return jmp.with_policy(made(), f"{format}(min_size=0)_from_mixed_bfloat16")


SHAPES = {"MLP": (8, 1024, 1024), "transformer block": (4, 64, 256)}
"""The models of `benchmarks.float8`, by the shapes of their inputs: batch, length, width."""

BLOCKS = {format: functools.partial(_with_blocks, format) for format in ("mxfp8", "nvfp4")}
"""The contestants that compute in blocks, by their format."""

CONFIG, BATCH = GPTConfig(width=768, depth=2, heads=12, context=256), 8
"""The GPT that is served and trained in int8."""

WIDE = GPTConfig(width=4096, depth=1, heads=32, context=256)
"""The GPT that serves one token: a TPU would keep fewer weights in its fast memory."""


def float8(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Iterator[Row]:
    """Loss, gradients of parameters and input, and next state, over bfloat16."""
    labels = {
        **{recipe: ("ours", recipe) for recipe in OURS},
        **{format: ("ours", format) for format in BLOCKS},
        "qwix": ("qwix", "current"),
        "qwix by channel": ("qwix", "current/row"),
    }
    for model, shape in shapes.items():
        entries = {
            name: Entry(f"float8, {model}: {name}", functools.partial(_train_in_float8, name, model, shape))
            for name in (BFLOAT16, *labels)
        }
        for name, of_contestant in labels.items():
            yield Row((model, *of_contestant), entries[name], entries[BFLOAT16])


def _train_in_float8(contestant: str, model: str, shape: tuple[int, ...]) -> Program:
    module = (CONTESTANTS | BLOCKS)[contestant](MODELS[model])
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    variables: Any = jax.eval_shape(module.init, jax.random.key(0), x)
    return Case(module, variables, x, x).training()  # type: ignore  # shapes stand for arrays


def _stored(format: str, **rule: Any) -> Scheme:
    return Scheme(format, f"{format}_from_mixed_bfloat16", rule)


_E4M3, _W4A8 = "float8_e4m3fn", "int4/128(activations=true)"

FORMATS = {
    "int8": _stored("int8", weight_qtype="int8", act_qtype="int8"),
    "int8, static scales": _stored("int8(act_scale=static)"),
    "int8 weights": _stored("int8(activations=false)", weight_qtype="int8"),
    "e4m3/-1": _stored("e4m3/-1", weight_qtype=_E4M3),
    "e4m3/-1, e4m3 inputs": _stored("e4m3/-1(activations=true)", weight_qtype=_E4M3, act_qtype=_E4M3),
    "e4m3/128": _stored("e4m3/128"),
    "e4m3/128, e4m3 inputs": _stored("e4m3/128(activations=true)"),
    "int4/64": _stored("int4/64", weight_qtype="int4", tile_size=64),
    "int4/128, int8 inputs": _stored(_W4A8, weight_qtype="int4", act_qtype="int8", tile_size=128),
    "nf4/64": _stored("nf4/64", weight_qtype="nf4", tile_size=64),
    "mxfp4": _stored("mxfp4", weight_qtype="mxfp4", tile_size=32),
    "nvfp4 weights": _stored("nvfp4(activations=false)", weight_qtype="nvfp4", tile_size=16),
}
"""Formats of stored weights, with the options of a rule of qwix where it has the format."""

SERVED = tuple(name for name in FORMATS if name != "int8, static scales")


def int8(
    config: GPTConfig = CONFIG,
    batch: int = BATCH,
    served: tuple[str, ...] = SERVED,
    decoded: tuple[str, ...] = SERVED,
) -> Iterator[Row]:
    """The forward pass of a GPT, its weights quantized before or as it runs, and loss and gradients, over bfloat16.

    In bfloat16, served models have weights in bfloat16, and models that run from float32 weights cast them. One token
    is one position of each sequence, by a wider model: each weight is read for few multiplications.
    """
    serve, run, train = (functools.partial(kind, config, batch) for kind in (_serve, _run, _train))
    decode = functools.partial(_serve, WIDE, batch, length=1)
    kinds: list[tuple[str, Callable[..., Program], tuple[str, ...]]] = [
        ("forward, served", serve, served),
        ("one token, served", decode, decoded),
        ("forward, weights as it runs", run, ("int8", "int8 weights")),
        ("loss and gradients", train, ("int8",)),
    ]
    for kind, make, formats in kinds:
        bfloat16 = Entry(f"{kind}: bfloat16", functools.partial(make, None, None))
        for name in formats:
            mine = Entry(f"{kind}: {name}", functools.partial(make, FORMATS[name], "ours"))
            yield Row((kind, "ours", name), mine, bfloat16)
            if make is not run and FORMATS[name].rule:
                theirs = Entry(f"{kind}: {name}, qwix", functools.partial(make, FORMATS[name], "qwix"))
                yield Row((kind, "qwix", name), theirs, bfloat16)


def int8_static(config: GPTConfig = CONFIG, batch: int = BATCH) -> Iterator[Row]:
    """The forward pass of a GPT stored in int8, with dynamic and with static scales of its inputs, over bfloat16."""
    make = functools.partial(_serve, config, batch)
    for name in ("int8", "int8, static scales"):
        mine = Entry(f"forward, served: {name}", functools.partial(make, FORMATS[name], "ours"))
        yield Row((name,), mine, Entry("forward, served: bfloat16", functools.partial(make, None, None)))


def _serve(
    config: GPTConfig, batch: int, format: Scheme | None, whose: str | None, length: int | None = None
) -> Program:
    tokens, params = _tokens(config, batch, length), _params(config)
    if format is None:
        half = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), params)
        return Program(jax.jit(_apply(HandGPT(config, jnp.bfloat16))), (half, tokens))
    if whose == "ours":
        quantized = quant.quantize(params, _policy(format))
        return Program(jax.jit(_apply(jmp.with_policy(GPT(config), _policy(format)))), (quantized, tokens))
    import qwix

    rules = [qwix.QuantizationRule(module_path=LAYERS, **format.rule)]
    model = qwix.quantize_model(HandGPT(config, jnp.bfloat16), qwix.PtqProvider(rules))
    return Program(jax.jit(_apply(model)), (jax.eval_shape(model.init, jax.random.key(0), tokens)["params"], tokens))


def _run(config: GPTConfig, batch: int, format: Scheme | None, whose: str | None) -> Program:
    model = HandGPT(config, jnp.bfloat16) if format is None else jmp.with_policy(GPT(config), _policy(format))
    return Program(jax.jit(_apply(model)), (_params(config), _tokens(config, batch)))


def _train(config: GPTConfig, batch: int, format: Scheme | None, whose: str | None) -> Program:
    tokens = _tokens(config, batch)
    if format is None:
        model = HandGPT(config, jnp.bfloat16)
    elif whose == "ours":
        model = jmp.with_policy(GPT(config), _policy(format))
    else:
        import qwix

        rule = qwix.QtRule(module_path=LAYERS, **format.rule, additional_qt_config={"use_original_residuals": False})
        model = qwix.quantize_model(HandGPT(config, jnp.bfloat16), qwix.QtProvider([rule]))
    loss = lambda params, tokens: cross_entropy(_apply(model)(params, tokens), tokens)
    return Program(jax.jit(jax.value_and_grad(loss)), (_params(config), tokens))


def _policy(format: Scheme) -> jmp.PolicyMap:
    return jmp.PolicyMap({LAYERS: format.policy}, default="mixed_bfloat16")  # as qwix, which cannot quantize the table


def _apply(model: Any) -> Callable[[Any, Any], Any]:
    return lambda params, tokens: model.apply({"params": params}, tokens)


def _params(config: GPTConfig) -> Any:
    tokens = jax.ShapeDtypeStruct((1, config.context), jnp.int32)
    return jax.eval_shape(GPT(config).init, jax.random.key(0), tokens)["params"]


def _tokens(config: GPTConfig, batch: int, length: int | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, length or config.context), jnp.int32)
