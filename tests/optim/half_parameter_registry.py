"""The transformations for half-precision parameters; a law holds for every entry."""

import jax
import optax

from jmp_policy import optim

METHODS = {
    "masters": optim.master_weights,
    "split": lambda inner: optim.master_weights(inner, mode="split"),
    "kahan": optim.kahan,
    "stochastic": lambda inner: optim.stochastic_rounding(inner, jax.random.key(0)),
}
HALVES = [(name, "bfloat16") for name in METHODS] + [(name, "float16") for name in METHODS if name != "split"]
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "muon": lambda: optax.contrib.muon(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2),
}
