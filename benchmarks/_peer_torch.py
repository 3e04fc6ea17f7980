"""The peers' models in PyTorch, with the weights of linen, trained by `torch.amp` as its recipe writes the loop.

It runs on a CPU, in one thread, so that its figures repeat. Importing it raises ImportError without PyTorch.
"""

import copy
import functools
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from torch import nn
from torch.nn import functional as F

from examples.gpt.model import GPTConfig

torch.set_num_threads(1)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": None}


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
    """A model with AdamW, a cosine decay of its learning rate with `decay_steps`, and a `GradScaler` in float16."""

    def __init__(
        self,
        made: TorchModel,
        dtype: str,
        scale: float = 2.0**15,
        period: int = 2000,
        learning_rate: float = 1e-3,
        decay_steps: int | None = None,
    ):
        self._made, self._dtype = made, DTYPES[dtype]
        parameters = list(made.named.values())
        self._optimizer = torch.optim.AdamW(parameters, learning_rate, eps=1e-8, weight_decay=1e-4)
        if decay_steps is None:
            self._schedule: Any = torch.optim.lr_scheduler.ConstantLR(self._optimizer, 1.0)
        else:
            self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, decay_steps)
        enabled = dtype == "float16"
        self._scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=period, enabled=enabled)
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
        x, labels = batch
        x, faults = x if isinstance(x, tuple) else (x, None)
        x, labels = _tensor(x), _tensor(labels).long()
        self._optimizer.zero_grad()
        with torch.autocast("cpu", self._dtype, enabled=self._dtype is not None):
            logits = self._made.module(x)
            loss = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
        self._scaler.scale(loss).backward()
        if faults is not None:
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


class GPT(nn.Module):
    """The GPT of `examples.gpt`."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.norm = _norm(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens.long()) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


class _Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.attention_norm, self.mlp_norm = _norm(config), _norm(config)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.project(self.attend(self.qkv(self.attention_norm(x))))
        return x + self.contract(F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh"))

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv.shape
        queries, keys, values = qkv.reshape(batch, length, self.heads, -1).transpose(1, 2).chunk(3, -1)
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
        visible = torch.ones(length, length).tril().bool()
        weights = torch.softmax(scores.masked_fill(~visible, torch.finfo(scores.dtype).min), -1)
        return (weights @ values).transpose(1, 2).reshape(batch, length, -1)


def gpt(config: GPTConfig) -> TorchModel:
    """The GPT. Its weights are linen's once they were given to `Trainer.init`."""
    model = GPT(config)
    named: dict[tuple[str, ...], Any] = {
        ("embed", "embedding"): model.embed.weight,
        ("positions", "embedding"): model.positions.weight,
        **_named(("norm",), model.norm),
    }
    for index, block in enumerate(model.blocks):
        for name, layer in block.named_children():
            parents = ("attention", name) if name in ("qkv", "project") else (name,)
            named |= _named((f"blocks_{index}", *parents), layer)
    return TorchModel(model, named)


def mlp(sizes: tuple[int, int]) -> TorchModel:
    """Square layers."""
    width, depth = sizes
    layers = [nn.Linear(width, width) for _ in range(depth)]
    model = nn.Sequential(*[part for layer in layers[:-1] for part in (layer, nn.ReLU())], layers[-1])
    return TorchModel(model, _name_all({(f"Dense_{index}",): layer for index, layer in enumerate(layers)}))


def net(features: int, hidden: int, classes: int) -> TorchModel:
    """The model of the benchmark of faults."""
    # Both begin at the identity; torch's momentum is the weight of the new value.
    model = nn.Sequential(
        nn.Linear(features, hidden), nn.BatchNorm1d(hidden, momentum=0.01), nn.ReLU(), nn.Linear(hidden, classes)
    )
    names = {("Dense_0",): model[0], ("BatchNorm_0",): model[1], ("Dense_1",): model[3]}
    return TorchModel(model, _name_all(names))


GPT_OR_MLP: dict[str, Callable[[Any], TorchModel]] = {"GPT": gpt, "MLP": mlp}


def _norm(config: GPTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.width, eps=1e-6)


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
