"""The bit budget on the GPT of the example, beside maps that need no search."""

import jax
import pytest

import jmp_policy as jmp
from examples.gpt.data import load_corpus, sample_batch, validation_batches
from examples.gpt.gpt_linen import GPT, Trainer
from examples.gpt.model import GPTConfig, TrainerConfig, cross_entropy, split_windows
from jmp_policy import quant

CONFIG = GPTConfig(width=64, depth=3, context=32)
MODEL = GPT(CONFIG)
LOW, MIDDLE, HIGH = "int4/128", "int4/32", "int8(activations=false)"
NAMES = "attention/qkv", "attention/project", "expand", "contract"
LAYERS = [f"blocks_{index}/{name}" for index in range(3) for name in NAMES]


def loss_fn(model, variables, windows):
    inputs, targets = split_windows(windows)
    return cross_entropy(model.apply(variables, inputs), targets)


def train(corpus, seed, steps=1500):
    trainer = Trainer(TrainerConfig(jmp.get_policy("float32"), CONFIG, seed))
    with jax.numpy_dtype_promotion("standard"):  # optax.adam needs it
        for step in range(steps):
            trainer.step(sample_batch(corpus.train, seed=seed, step=step, batch_size=16, context=CONFIG.context))
    return {"params": trainer.params}


def count_bits(variables, policy):
    is_leaf = lambda node: isinstance(node, quant.QuantizedArray)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: quant.quantize(variables, policy)), is_leaf=is_leaf)
    stored = [leaf for leaf in leaves if is_leaf(leaf)]
    return 8 * sum(weight.nbytes for weight in stored) / sum(weight.size for weight in stored)


def widen_ends(variables, limit):
    """Gives the first and the last layers 8 bits, one at a time, as far as they fit."""
    pairs = zip(LAYERS, reversed(LAYERS), strict=True)
    rules = {}
    for layer in dict.fromkeys(layer for pair in pairs for layer in pair):
        wider = {**rules, layer: f"{HIGH}_from_float32"}
        if count_bits(variables, jmp.PolicyMap(wider, f"{LOW}_from_float32")) <= limit:
            rules = wider
    return jmp.PolicyMap(rules, f"{LOW}_from_float32")


@pytest.mark.exhaustive
@pytest.mark.optimized
@pytest.mark.parametrize("seed", range(3))
def test_a_bit_budget_loses_less_than_wide_ends_and_than_one_format(seed):
    corpus = load_corpus()
    variables = train(corpus, seed)
    batch = sample_batch(corpus.train, seed=seed + 100, step=0, batch_size=256, context=CONFIG.context)
    (windows,) = validation_batches(corpus.validation, count=1, batch_size=512, context=CONFIG.context)
    uniform = jmp.PolicyMap({}, f"{MIDDLE}_from_float32")
    limit = count_bits(variables, uniform)
    options = {"metric": loss_fn, "formats": [LOW, MIDDLE, HIGH], "effective_bits": limit}
    tuning = jmp.contrib.tune_bits(MODEL, (variables, batch), "float32", **options)
    measure = jax.jit(lambda model, variables: loss_fn(model, variables, windows), static_argnums=0)
    before = float(measure(MODEL, variables))
    found, ends, same = (
        float(measure(jmp.with_policy(MODEL, policy), quant.quantize(variables, policy))) / before - 1
        for policy in (tuning.policy_map, widen_ends(variables, limit), uniform)
    )
    print(f"{limit:.2f} bits: {found:+.3%}, wide ends {ends:+.3%}, one format {same:+.3%}")
    assert count_bits(variables, tuning.policy_map) <= limit
    assert found < ends
    assert found < same
