"""`--policy auto`: a few steps in float32, what half precision would lose of them, and the map that saves it."""

import dataclasses
from collections.abc import Iterable

import numpy as np
from rich.console import Console

import jmp_policy as jmp
from jmp_policy.numerics import Prediction, Stats, predict

from ._data import Corpus, sample_batch
from ._gpt import TrainerConfig
from ._run_folder import RunConfig
from ._trainer import make_trainer

AUTO = "auto"
OBSERVED_STEPS = 20


def decide_policy(config: RunConfig, corpus: Corpus, console: Console) -> RunConfig:
    """Gives a configuration the map and the loss scale that steps in float32 ask for, and prints them."""
    sizes = {"batch_size": config.batch_size, "context": config.model.context}
    batches = (sample_batch(corpus.train, seed=config.seed, step=step, **sizes) for step in range(OBSERVED_STEPS))
    trainer = TrainerConfig(config.policy, config.model, config.seed, config.learning_rate)
    prediction = predict_policy(config.api, trainer, batches)
    print_decision(prediction, console)
    return dataclasses.replace(config, policy_map=prediction.policy_map, first_scale=prediction.loss_scale)


def predict_policy(api: str, config: TrainerConfig, batches: Iterable[np.ndarray]) -> Prediction:
    """Trains some steps in float32, and predicts from their tensors what a policy would lose.

    Args:
      api: the Flax API.
      config: what to train, and the policy to ask about.
      batches: a batch of windows for each step.
    """
    float32 = jmp.Policy("float32", "float32", "float32")
    trainer = make_trainer(api, TrainerConfig(float32, config.model, config.seed, config.learning_rate))
    stats: Stats | None = None
    for windows in batches:
        new = trainer.observe(windows, "all")
        stats = new if stats is None else stats.merge(new)
        trainer.step(windows)
    if stats is None:
        raise ValueError("There are no batches: predict_policy needs at least one, for example 20.")
    return predict(stats, config.policy, by="with_policy")


def print_decision(prediction: Prediction, console: Console) -> None:
    """Says which modules stay in float32, why, and with which loss scale training begins."""
    console.print(f"{OBSERVED_STEPS} steps in float32 were measured, to decide what {prediction.policy} may have.")
    if not prediction.culprits:
        console.print("No module needs float32.")
    for path in prediction.culprits:
        reason = next(reason for reason in prediction.reasons if reason.path == path and reason.cure == "float32")
        console.print(f"float32 for {reason}")
    if prediction.loss_scale is not None and prediction.loss_scale != 1:
        console.print(f"The loss scale begins at {prediction.loss_scale:g}.")
