"""The model of the faults in PyTorch, with the weights of linen, trained by `torch.amp` as its recipe writes the loop.

It runs on a CPU, in one thread, so that its figures repeat. Importing it raises ImportError without PyTorch.
"""

import copy
import functools
import operator
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)


class TorchModel(NamedTuple):
    """A module, and its parameters by the paths that they have in linen; a kernel is the transpose of a weight."""

    module: nn.Module
    named: dict[tuple[str, ...], torch.nn.Parameter]


class TorchState(NamedTuple):
    """The carry of a loop in PyTorch, as copies that the next step does not overwrite: parameters as those of linen,
    the buffers of the model, and the `state_dict()` of the optimizer, the schedule and the `GradScaler`.
    """

    params: Any
    variables: dict[str, np.ndarray]
    opt_state: dict[str, Any]
    schedule: dict[str, Any]
    scale: dict[str, Any]
    step: np.ndarray


class Trainer:
    """A model with AdamW, a cosine decay of its learning rate, and a `GradScaler` in float16."""

    def __init__(self, made: TorchModel, scale: float, period: int, learning_rate: float, decay_steps: int):
        self._made = made
        parameters = list(made.named.values())
        self._optimizer = torch.optim.AdamW(parameters, learning_rate, eps=1e-8, weight_decay=1e-4)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, decay_steps)
        self._scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=period)
        self._steps = 0

    def init(self, params: Any) -> TorchState:
        """The state before the first step, of parameters of linen."""
        flat = flatten_dict(params)
        with torch.no_grad():
            for path, parameter in self._made.named.items():
                parameter.copy_(torch.tensor(_turn(path, np.asarray(flat[path]))))
        return self.state()

    def train(self, batch: Any) -> float:
        """Takes a step, in place, and returns its loss."""
        (x, faults), labels = batch
        x, labels = _tensor(x), _tensor(labels).long()
        self._optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = self._made.module(x)
            loss = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
        self._scaler.scale(loss).backward()
        flat = flatten_dict(faults)
        for path, parameter in self._made.named.items():
            assert parameter.grad is not None
            parameter.grad += torch.tensor(_turn(path, np.asarray(flat[path])))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the schedule sees that the optimizer was skipped, and goes on
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._schedule.step()
        self._steps += 1
        return float(loss.detach())

    def step(self, state: TorchState, batch: Any) -> tuple[TorchState, float]:
        """A step from a state."""
        self._restore(state)
        loss = self.train(batch)
        return self.state(), loss

    def state(self) -> TorchState:
        """The state of now."""
        named = self._made.named.items()
        params = unflatten_dict({path: _turn(path, parameter.detach().numpy()).copy() for path, parameter in named})
        buffers = {name: buffer.numpy().copy() for name, buffer in self._made.module.named_buffers()}
        rest = (self._optimizer, self._schedule, self._scaler)
        return TorchState(params, buffers, *(copy.deepcopy(part.state_dict()) for part in rest), np.int32(self._steps))

    def _restore(self, state: TorchState) -> None:
        self.init(state.params)
        for name, buffer in self._made.module.named_buffers():
            buffer.copy_(torch.from_numpy(np.array(state.variables[name])))
        self._optimizer.load_state_dict(copy.deepcopy(state.opt_state))
        self._schedule.load_state_dict(copy.deepcopy(state.schedule))
        self._scaler.load_state_dict(copy.deepcopy(state.scale))
        self._steps = int(state.step)


def net(features: int, hidden: int, classes: int) -> TorchModel:
    """The model of the benchmark of faults."""
    # Both begin at the identity; torch's momentum is the weight of the new value.
    model = nn.Sequential(
        nn.Linear(features, hidden), nn.BatchNorm1d(hidden, momentum=0.01), nn.ReLU(), nn.Linear(hidden, classes)
    )
    names = {("Dense_0",): model[0], ("BatchNorm_0",): model[1], ("Dense_1",): model[3]}
    return TorchModel(model, _name_all(names))


def _named(path: tuple[str, ...], layer: nn.Module) -> dict[tuple[str, ...], Any]:
    weight = "kernel" if isinstance(layer, nn.Linear) else "scale"
    found = {(*path, weight): layer.weight}
    return found | ({} if layer.bias is None else {(*path, "bias"): layer.bias})


def _name_all(layers: Mapping[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    return functools.reduce(operator.or_, (_named(path, layer) for path, layer in layers.items()))


def _turn(path: tuple[str, ...], array: np.ndarray) -> np.ndarray:
    return array.T if path[-1] == "kernel" else array


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))
