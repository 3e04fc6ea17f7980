"""`tune_bits`: finds the format of each layer, so that weights take a given number of bits."""

import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from ..._base import describe, hide_frames, sum_arrays, sum_code, sum_program
from ...loss_scale import NoOpLossScale
from ...modules import find_adapter
from ...numerics._tune import Subject, TrialLog, check_budget, name_metric
from ...policy import Policy, PolicySpec, get_policy, parse_quantization, stored_format_of
from ._bit_tuning import BitTuning
from ._choice import BitTuner
from ._layers import write_example

_DTYPES = ("float32", "bfloat16", "float16")


@hide_frames
def tune_bits(
    model: Any,
    args: Sequence[Any],
    policy: PolicySpec,
    *,
    formats: Sequence[str],
    effective_bits: float,
    metric: Callable[..., Any] | None = None,
    budget: int | None = None,
    trials_file: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> BitTuning:
    """Finds the format of each layer of a module, so that the loss rises little within a number of bits per weight.

    One pass predicts the increase of the loss for each layer and format: half the mean square, over examples, of
    gradient times rounding error. The best map by prediction is measured with the nearest others, until none of them
    has a smaller loss.

    Args:
      model: a linen or nnx module. It is not changed.
      args: a tuple of its arguments; for a linen module the variables come first.
      policy: a policy without a quantization, around the formats.
      formats: stored formats to choose from, such as `["int4/128", "int8", "bfloat16"]`. A dtype stores a
        weight unquantized.
      effective_bits: the largest mean number of bits per weight, over the weights that some format quantizes. Scales
        and zero points count, as `quant.QuantizedArray` stores them.
      metric: the loss: `metric(model, *args)` gets the module under a map (or unchanged) and returns a differentiable
        scalar, the mean of the losses of the examples. The examples are the rows of all arguments but variables. It is
        jitted. If `None`, the output of the module is the loss.
      budget: the maximum number of trials; unlimited if `None`.
      trials_file: a file with one trial per line. Trials in it are not run again, so a search can resume.
      progress: whether to print a line for each trial on standard error. If `None`, only if that is a terminal.

    Returns:
      A `BitTuning`: a `jmp.Tuning` with `.formats` and `.curve`, the loss over the bits. Prints as tables.

    Raises:
      TypeError: `model` is not a module or a function, or `args` is not a tuple or list.
      ValueError: `model` is a function; the policy is unknown, is a map or has a quantization; a format is unknown or
        stores no weights, or none quantizes; `effective_bits` is not positive, or too small for the model; the budget
        is not positive; the loss is not a finite scalar other than 0, or has inputs without a common axis of examples;
        or the file has trials of something else.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (8, 64))
    >>> options = {"formats": ["int4/64", "int8"], "metric": lambda model, x: jnp.mean(model(x) ** 2)}
    >>> tuning = jmp.contrib.tune_bits(model, (x,), "float32", effective_bits=5.0, **options)
    >>> tuning.formats
    {'': 'int4/64'}
    """
    example = write_example(model)
    given = get_policy(policy)
    if not isinstance(given, Policy):
        raise ValueError(f"tune_bits takes one policy and finds the map, got {given!r}. {example}")
    policies = parse_formats(formats, effective_bits, given, example)
    check_budget(budget)
    if isinstance(model, type) or not (find_adapter(model) is not None or callable(model)):
        raise TypeError(f"tune_bits takes a Flax module, got {describe(model)}. {example}")
    if not isinstance(args, tuple | list):
        raise TypeError(f"tune_bits takes a tuple of arguments, got {describe(args)}. {example}")
    subject = Subject(model, tuple(args), differentiates=False, has_aux=False, seed=0)
    run, arrays = subject.make_run(None, NoOpLossScale())
    header = {
        "function": subject.name,
        "policy": " or ".join([str(given), *policies]),
        "compared": name_metric(metric) if metric else "outputs",
        "arguments": sum_arrays(arrays),
        "traced program": trials_file and sum_program(run, arrays),
        "code of the metric": metric and sum_code(metric),
        "jax": f"{jax.__version__} on {jax.default_backend()}",
    }
    is_shown = sys.stderr.isatty() if progress is None else progress
    log = TrialLog(None if trials_file is None else Path(trials_file), header, is_shown, "tune_bits")
    return BitTuner(subject, given, policies, metric, log).tune(effective_bits, budget)


def parse_formats(formats: Any, effective_bits: Any, policy: Policy, example: str) -> dict[str, Policy]:
    """Returns the policy of each format, by name; checks the arguments of `tune_bits`."""
    is_number = isinstance(effective_bits, int | float) and not isinstance(effective_bits, bool)
    if not is_number or not 0 < effective_bits < math.inf:
        raise ValueError(f"effective_bits must be a number above 0, got {effective_bits!r}. {example}")
    if isinstance(formats, str) or not formats:
        raise ValueError(f"effective_bits needs a list of formats to choose from, got {formats!r}. {example}")
    if policy.quantization is not None:
        raise ValueError(f"The policy {policy.name!r} has a quantization, and formats replace it. {example}")
    policies = {}
    for name in formats:
        if name in _DTYPES:
            policies[name] = policy.replace(param_dtype=name)
            continue
        quantization = parse_quantization(name, where=" in formats")
        if stored_format_of(quantization) is None:
            raise ValueError(f"The format {str(quantization)!r} in formats stores no weights. {example}")
        policies[str(quantization)] = policy.replace(quantization=quantization)
    if all(each.quantization is None for each in policies.values()):
        raise ValueError(f"No format quantizes, got {formats!r}. {example}")
    return policies
