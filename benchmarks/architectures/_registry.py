"""The architectures, each with sizes and data that let it learn within fifty steps."""

import functools

import numpy as np
import optax

import jmp_policy as jmp
from benchmarks.architectures import _data, _moe, _resnet, _tagger, _transformer, _vae
from benchmarks.architectures._architecture import Architecture

STEPS = 50

SMALL_SCALE = jmp.DynamicLossScale(2.0**8)
"""A first loss scale for losses that are large, because they are sums: 2**15 would overflow for some steps."""

make_transformer = functools.partial(_transformer.Transformer, vocabulary=32, width=32, depth=2, heads=4, max_length=24)

ARCHITECTURES = {
    "ResNet-50": Architecture(
        "linen",
        functools.partial(_resnet.ResNet50, num_classes=4, num_filters=8),
        _resnet.loss_fn,
        _data.gratings(np.random.default_rng(0), STEPS, 16, classes=4),
        optax.sgd(0.005, momentum=0.9, nesterov=True),
        inputs=("image",),
    ),
    "transformer": Architecture(
        "linen",
        make_transformer,
        _transformer.loss_fn,
        _data.markov_chains(np.random.default_rng(1), STEPS, 16, length=24, vocabulary=32),
        optax.adamw(5e-3),
        inputs=("tokens",),
    ),
    "LSTM tagger": Architecture(
        "linen",
        functools.partial(_tagger.Tagger, vocabulary=64, tags=6, width=32),
        _tagger.loss_fn,
        _data.sentences(np.random.default_rng(2), STEPS, 32, length=16, vocabulary=64, tags=6),
        optax.adam(1e-2),
        inputs=("tokens", "lengths"),
    ),
    "VAE": Architecture(
        "nnx",
        functools.partial(_vae.VAE, 8, 8),
        _vae.loss_fn,
        _data.blobs(np.random.default_rng(3), STEPS, 32),
        optax.adam(3e-3),
    ),
    "mixture of experts": Architecture(
        "nnx",
        functools.partial(_moe.MoEClassifier, features=16, classes=4, width=32, depth=2, experts=4),
        _moe.loss_fn,
        _data.clusters(np.random.default_rng(4), STEPS, 128, features=16, classes=4, kinds=4),
        optax.adamw(3e-3),
    ),
}
