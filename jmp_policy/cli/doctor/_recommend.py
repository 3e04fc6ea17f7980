"""The policy that follows from what was measured, and the words that say why."""

import dataclasses
from collections.abc import Iterable, Mapping

from ._machine import Machine
from ._measure import HALF_DTYPES, MatmulRate, Speedup, StepTime

# Ratios nearer to one than this are a tie, however quiet the machine was.
TIE = 0.05

# float16 needs a loss scale, and skips steps. It must be so much faster than bfloat16 to be worth that.
FLOAT16_GAIN = 1.1


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A policy, as `get_policy` reads it, and why."""

    policy: str
    reason: str


def recommend_policy(matmuls: Iterable[MatmulRate], steps: Mapping[str, StepTime], machine: Machine) -> Recommendation:
    """Chooses the policy to train with, by the time of a forward and backward pass.

    Matmuls alone decide nothing: where they are quick, the rest of a step may lose what they gain. Of the half formats,
    bfloat16 goes first: it has the range of float32, so it needs no loss scale and no step is ever skipped.

    >>> from jmp_policy.cli import doctor
    >>> rates = [doctor.MatmulRate(kind, 1.0, 8.0) for kind in doctor.MATMULS]
    >>> step = doctor.StepTime(1.0, doctor.Speedup(2.0, 1.9, 2.0))
    >>> steps = {"bfloat16": step, "float16": step}
    >>> machine = doctor.Machine("gpu", "H100", "Linux", {"jaxlib": "0.12.0"})
    >>> doctor.recommend_policy(rates, steps, machine).policy
    'mixed_bfloat16'
    """
    measured = Measured({rate.kind.name: rate for rate in matmuls}, steps, machine)
    verdicts = {dtype: judge(steps[dtype].speedup) for dtype in HALF_DTYPES}
    faster = [dtype for dtype in HALF_DTYPES if verdicts[dtype] == "faster"]
    if not faster:
        return Recommendation("float32", _explain_float32(measured, verdicts.values()))
    dtype = faster[0]
    if "float16" in faster and _gains_enough(steps["float16"].speedup, steps["bfloat16"].speedup):
        dtype = "float16"
    return Recommendation(f"mixed_{dtype}", _explain_half(measured, dtype))


def judge(speedup: Speedup) -> str:
    """`"faster"` or `"slower"` than float32, or a `"tie"` where the measurement cannot tell.

    >>> judge(Speedup(1.5, 1.4, 1.6)), judge(Speedup(0.8, 0.7, 0.9)), judge(Speedup(1.5, 0.9, 1.6))
    ('faster', 'slower', 'tie')
    """
    if speedup.low > 1 and speedup.value > 1 + TIE:
        return "faster"
    if speedup.high < 1 and speedup.value < 1 - TIE:
        return "slower"
    return "tie"


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the words are about."""

    matmuls: Mapping[str, MatmulRate]
    steps: Mapping[str, StepTime]
    machine: Machine

    @property
    def jaxlib(self) -> str:
        """The compiler, by the package that has it."""
        return f"jaxlib {self.machine.versions['jaxlib']}"

    def describe_ratios(self) -> str:
        """Says how a step, and a matmul alone, in each half format compare to float32."""
        return " and ".join(map(self._describe_ratio, HALF_DTYPES))

    def _describe_ratio(self, dtype: str) -> str:
        speedup, rate = self.steps[dtype].speedup, self.matmuls[dtype]
        tie = "a tie; " if judge(speedup) == "tie" else ""
        alone = "no matmuls" if rate.teraflops is None else f"matmuls alone {rate.speedup:.2f}x"
        return f"{speedup.value:.2f}x the speed of float32 in {dtype} ({tie}{alone})"


def _gains_enough(float16: Speedup, bfloat16: Speedup) -> bool:
    return float16.low > bfloat16.high and float16.value > FLOAT16_GAIN * bfloat16.value


def _explain_half(measured: Measured, dtype: str) -> str:
    if dtype == "bfloat16":
        advice = "bfloat16 has the range of float32, so that it needs no loss scale"
    else:
        advice = "the small range of float16 is what the dynamic loss scale is for"
    return f"forward and backward run at {measured.describe_ratios()}; {advice}"


def _explain_float32(measured: Measured, verdicts: Iterable[str]) -> str:
    """Says that half precision is not faster, and what in each format takes the time."""
    heads = {"slower": "is slower here", "tie": "gains no time here, within the noise"}
    found = set(verdicts)
    how = heads[found.pop()] if len(found) == 1 else "gains no time here"
    blame = _blame_conversion(measured) or "; ".join(_blame(measured, dtype) for dtype in HALF_DTYPES)
    return f"half precision {how}: forward and backward run at {measured.describe_ratios()}; {blame}"


def _blame_conversion(measured: Measured) -> str:
    """The sentence where neither format is multiplied in at all, or the empty string."""
    if all(measured.matmuls[dtype].multiplied_in == "float32" for dtype in HALF_DTYPES):
        return f"{measured.jaxlib} computes the matmuls of both by converting to float32"
    return ""


def _blame(measured: Measured, dtype: str) -> str:
    """Says what a step in a half format that is not faster spends its time on, as far as it was measured."""
    rate, products = measured.matmuls[dtype], measured.steps[dtype].multiplied_in
    if rate.teraflops is None:
        return f"{measured.jaxlib} has no matmul in {dtype} for this device"
    if rate.multiplied_in == "float32":
        return f"{measured.jaxlib} computes {dtype} matmuls by converting to float32"
    if rate.speedup > 1 + TIE:
        widened = products.get("float32", 0)
        also = f", in which {widened} of {sum(products.values())} matmuls are in float32" if widened else ""
        return f"{dtype} matmuls are quick here, but the rest of the step is not{also}"
    was_kept = rate.multiplied_in == dtype
    which = f"{measured.jaxlib} leaves {dtype} matmuls in {dtype}, but they" if was_kept else f"{dtype} matmuls"
    return f"{which} run no faster than in float32{_describe_instructions(measured.machine, dtype)}"


def _describe_instructions(machine: Machine, dtype: str) -> str:
    """Says which instructions the operating system lists, as a reason or in contrast; nothing where it does not say."""
    if machine.half_instructions is None:
        return ""
    has = machine.half_instructions[dtype]
    if not has:
        return f", and Linux lists no {dtype} instructions for this CPU"
    return f", although Linux lists {' and '.join(has)} for this CPU"
