"""The ten faults of `_origins_jax.py` in PyTorch, and who looks for them there. It imports no JAX.

Run from the root of the repository by any Python that has PyTorch, and prints as JSON what each contestant says:

    python -m benchmarks._origins_torch
"""

import contextlib
import io
import json
import traceback
import warnings
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks._origins_reports import ARGUMENTS, TORCH_CONTESTANTS, Fault, judge, name_of


def exp_that_overflows(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    z = torch.exp(y)  # fault
    return torch.sum(z)


def infinity_minus_infinity(x: torch.Tensor) -> torch.Tensor:
    large = x * 1e38
    y = large * 1e5  # cause
    z = y + 1
    difference = z - y  # fault
    return torch.sum(difference)


def entropy_of_a_zero(p: torch.Tensor) -> torch.Tensor:
    logarithm = torch.log(p)  # cause
    terms = p * logarithm  # fault
    return -torch.sum(terms)


def norm_of_zeros(x: torch.Tensor) -> torch.Tensor:
    squares = x * x  # fault
    norm = torch.sqrt(torch.sum(squares))  # cause
    return norm + torch.sum(torch.cos(x))


def trap_of_where(x: torch.Tensor) -> torch.Tensor:
    positive = torch.clamp(x, min=0)
    root = torch.sqrt(positive)  # fault
    return torch.sum(torch.where(x > 0, root, 0))


def harmless_ones_before_it(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    means = counts / counts  # harmless
    means = torch.where(counts > 0, means, 0)
    scores = torch.where(counts > 0, x, -torch.inf)  # harmless
    weights = torch.softmax(scores, 0)
    y = weights * means - 0.5
    logarithm = torch.log(y)  # fault
    return torch.sum(logarithm)


def turn_of_a_loop(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    def body(carry: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        carry = torch.sin(carry)
        root = torch.sqrt(carry * sign)  # fault
        return carry + root

    for sign in signs:
        x = body(x, sign)
    return torch.sum(x)


def under_a_remat(x: torch.Tensor) -> torch.Tensor:
    def block(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) - 0.9
        root = torch.sqrt(y)  # fault
        return root * x

    return torch.sum(checkpoint(block, x * 2, use_reentrant=False))  # type: ignore[arg-type]


def backward_in_float16(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x, scale = x.half(), scale.half()
    y = x * scale  # fault
    z = y * scale
    return torch.sum(z.float())


def argument_that_is_nan(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    return torch.sum(z * y)


FAULTS = {
    name_of(fun): Fault.read(fun)
    for fun in (
        exp_that_overflows,
        infinity_minus_infinity,
        entropy_of_a_zero,
        norm_of_zeros,
        trap_of_where,
        harmless_ones_before_it,
        turn_of_a_loop,
        under_a_remat,
        backward_in_float16,
        argument_that_is_nan,
    )
}


class Model(torch.nn.Module):
    """A function as a module of a model, which is what hooks look at."""

    def __init__(self, fun: Callable[..., torch.Tensor]):
        super().__init__()
        self.fun = fun

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.fun(*args)


def look_with_anomaly(model: Model, args: tuple[torch.Tensor, ...]) -> None:
    with torch.autograd.detect_anomaly():
        model(*args).backward()


def look_with_hooks(model: Model, args: tuple[torch.Tensor, ...]) -> None:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(model)
    model(*args).backward()


CONTESTANTS = dict(zip(TORCH_CONTESTANTS, (look_with_anomaly, look_with_hooks), strict=True))

SECOND_ARGUMENT = "input[1] has nans"
"""How hooks call it. Not written where it is used: a traceback quotes the lines of its frames."""


def report_of(contestant: str, name: str) -> str:
    """Returns a contestant's report of a fault: its output, warnings and error; empty if it raises nothing.

    A contestant prints things where nothing is wrong, too.
    """
    first, *rest = (torch.tensor(values) for values in ARGUMENTS[name])
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("always")
        try:
            CONTESTANTS[contestant](Model(FAULTS[name].fun), (first.requires_grad_(), *rest))
        except (RuntimeError, ValueError) as error:
            said = "".join(str(warning.message) for warning in warned)
            return said + printed.getvalue() + "".join(traceback.format_exception(error))
    return ""


def judge_all(contestant: str) -> dict[str, str]:
    """Returns a contestant's report of each fault."""
    return {name: judge(report_of(contestant, name), fault, SECOND_ARGUMENT) for name, fault in FAULTS.items()}


def main() -> None:
    """Prints the verdicts of all contestants that are installed."""
    verdicts = {}
    for contestant in CONTESTANTS:
        with contextlib.suppress(ImportError):
            verdicts[contestant] = judge_all(contestant)
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
