"""Measures how fast the default device trains in each dtype, and recommends a policy."""

import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import __version__
from ..report import Report, Table, make_columns

PACKAGES = ("jax", "jaxlib", "flax", "optax")
# Names in /proc/cpuinfo, on x86 and ARM, of instructions that do more than convert.
HALF_INSTRUCTIONS = {"bfloat16": "avx512_bf16 amx_bf16 bf16 svebf16", "float16": "avx512_fp16 amx_fp16 asimdhp"}
HALF_DTYPES = tuple(HALF_INSTRUCTIONS)
MATMULS = {  # by name: the dtype, the dtype of the sums and the precision
    "float32 highest": ("float32", "float32", lax.Precision.HIGHEST),
    "float32 default": ("float32", "float32", lax.Precision.DEFAULT),
    "bfloat16": ("bfloat16", "bfloat16", lax.Precision.DEFAULT),
    "float16": ("float16", "float16", lax.Precision.DEFAULT),
    "float8_e4m3fn": ("float8_e4m3fn", "bfloat16", lax.Precision.DEFAULT),
    "int8": ("int8", "int32", lax.Precision.DEFAULT),
}
# Sides of the matrices, inputs of the perceptron and their width. On a CPU, a longer call would seldom be undisturbed.
SIZES = {"cpu": {"matrix": 1024, "rows": 1024, "width": 256}}
ROUNDS, FEWEST_ROUNDS, MOST_SECONDS = 25, 6, 3.0  # each call needs a quiet moment on a busy machine
TIE = 0.05  # speed-ups nearer to 1 are a tie, however quiet the machine is
BUSY = 0.25  # report more noise than this
FLOAT16_GAIN = 1.1  # how much faster than bfloat16 float16 must be to be worth a loss scale and skipped steps


@dataclasses.dataclass(frozen=True)
class Machine:
    platform: str
    device: str
    system: str
    versions: Mapping[str, str]
    half_instructions: Mapping[str, tuple[str, ...]] | None = None  # None where the system does not list them

    def __str__(self) -> str:
        device = self.device if self.device.startswith(self.platform) else f"{self.device} ({self.platform})"
        return f"{device}, {self.system}; jax {self.versions['jax']}, jaxlib {self.versions['jaxlib']}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the machine for JSON."""
        device = {"platform": self.platform, "name": self.device, "system": self.system}
        return {"versions": dict(self.versions), "device": device | {"half_instructions": self.half_instructions}}


def find_machine() -> Machine:
    """Describes JAX's default device and its computer."""
    device, count, cores, facts = jax.devices()[0], jax.device_count(), os.cpu_count() or 1, dict[str, str]()
    name = f"{count} x {device.device_kind}" if count > 1 else device.device_kind
    if device.platform == "cpu":
        text = file.read_text("utf-8", "replace") if (file := Path("/proc/cpuinfo")).is_file() else ""
        facts = dict(re.findall(r"^(\w[^\t:]*?)\s*: *(.*?) *$", text.partition("\n\n")[0], re.MULTILINE))
        name = facts.get("model name") or platform.processor() or device.device_kind
    system = f"{platform.system()} {platform.machine()}, {cores} core{'s' if cores > 1 else ''}"
    return Machine(device.platform, name, system, list_versions(), find_half_instructions(facts))


def list_versions() -> dict[str, str]:
    versions = {"jmp_policy": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def find_half_instructions(facts: Mapping[str, str]) -> dict[str, tuple[str, ...]] | None:
    """Finds the half-precision instructions in the lines of `/proc/cpuinfo`; None if it does not list instructions."""
    listed = facts.get("flags", facts.get("Features"))  # x86, ARM
    known = lambda names: tuple(name for name in names.split() if listed and name in listed.split())
    return None if listed is None else {dtype: known(names) for dtype, names in HALF_INSTRUCTIONS.items()}


@dataclasses.dataclass(frozen=True)
class MatmulRate:
    name: str
    dtype: str
    multiplied_in: str | None = None  # in the compiled program, if that tells
    teraflops: float | None = None  # 10**12 multiplications and additions per second; None if not supported
    speedup: float | None = None  # over float32 at highest precision; None if not supported


@dataclasses.dataclass(frozen=True)
class Speedup:
    """Speed relative to float32: the ratio of the shortest times, and its range over thirds of the rounds."""

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Returns "faster", "slower" or "tie"."""
        if self.low > 1 and self.value > 1 + max(TIE, self.high - self.low):
            return "faster"
        return "slower" if self.high < 1 and self.value < 1 - TIE else "tie"


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Time of a forward and backward pass."""

    seconds: float
    speedup: Speedup
    multiplied_in: Mapping[str, int] = dataclasses.field(default_factory=dict)  # matmuls per dtype


@dataclasses.dataclass(frozen=True, repr=False)
class Diagnosis(Report):
    """Measurements of a machine and the recommended policy."""

    machine: Machine
    sizes: Mapping[str, int]
    matmuls: list[MatmulRate]
    steps: dict[str, StepTime]
    policy: str  # the recommendation
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis for JSON; the help of `jmp-policy doctor` lists its keys."""
        measured = {key: dataclasses.asdict(self)[key] for key in ("sizes", "matmuls", "steps")}
        return self.machine.to_dict() | measured | {"recommendation": {"policy": self.policy, "reason": self.reason}}

    def _summarize(self) -> str:
        return self.policy

    def _list_tables(self, width: int | None) -> list[Table]:
        missing = ("-", "not supported", "-")
        show_rate = lambda rate: (rate.multiplied_in or "?", f"{rate.teraflops:.3g}", f"{rate.speedup:.2f}x")
        matmuls = [(rate.name, *(missing if rate.speedup is None else show_rate(rate))) for rate in self.matmuls]
        count = lambda step: ", ".join(f"{count} {name}" for name, count in step.multiplied_in.items()) or "?"
        show_step = lambda step: (count(step), f"{step.seconds * 1e3:.2f}", f"{step.speedup.value:.2f}x")
        steps = [(dtype, *show_step(step)) for dtype, step in self.steps.items()]
        return [
            Table(make_columns("matmul, XLA multiplies in", "TFLOP/s, over float32"), matmuls),
            Table(make_columns("forward and backward, XLA multiplies in", "ms, over float32"), steps),
        ]

    def _list_notes(self) -> list[str]:
        matrix, rows, width = (self.sizes[name] for name in ("matrix", "rows", "width"))
        perceptron = f"a perceptron of {rows} inputs, {width} x {4 * width}"
        measured = f"Shortest times of a matmul of {matrix} x {matrix} matrices, and of {perceptron}."
        noise = max((x.high - x.low) / x.value for x in (step.speedup for step in self.steps.values()))
        busy = f"This machine is busy: speed-ups of the perceptron vary by {noise:.0%}. Run this again when idle."
        advice = [f"Recommended policy: {self.policy}", f"Why: {self.reason}."]
        return [str(self.machine), measured, *[busy] * (noise > BUSY), *advice]


def diagnose() -> Diagnosis:
    machine = find_machine()
    sizes = SIZES.get(machine.platform, {"matrix": 8192, "rows": 8192, "width": 4096})
    matmuls, steps = measure_matmuls(sizes["matrix"]), measure_steps(sizes["rows"], sizes["width"])
    return Diagnosis(machine, sizes, matmuls, steps, *recommend_policy(matmuls, steps, machine))


def measure_matmuls(size: int, names: Iterable[str] = tuple(MATMULS)) -> list[MatmulRate]:
    """Measures square matmuls; `names` include float32 at highest precision."""
    calls = {name: _prepare_matmul(*MATMULS[name], size) for name in names}
    seconds = time_rounds({name: call for name, call in calls.items() if call is not None})
    rates = []
    for name, call in calls.items():
        measured: tuple[Any, ...] = ()
        if call is not None:
            read, best = read_matmuls(call.func.as_text()), min(seconds[name])
            speedup = min(seconds["float32 highest"]) / best
            measured = read[0] if len(read) == 1 else None, 2 * size**3 / best / 1e12, speedup
        rates.append(MatmulRate(name, MATMULS[name][0], *measured))
    return rates


def measure_steps(rows: int, width: int, dtypes: Iterable[str] = ("float32", *HALF_DTYPES)) -> dict[str, StepTime]:
    """Measures forward and backward passes of a perceptron with float32 parameters, including casts, per dtype."""
    calls = {dtype: _prepare_step(dtype, rows, width) for dtype in dtypes}
    seconds = time_rounds(calls)
    counts = {dtype: dict(Counter(read_matmuls(call.func.as_text()))) for dtype, call in calls.items()}
    return {d: StepTime(min(x), compare_times(seconds["float32"], x), counts[d]) for d, x in seconds.items()}


def compare_times(reference: Sequence[float], seconds: Sequence[float]) -> Speedup:
    """Compares shortest times, which show the device and not its other load; needs at least three rounds."""
    thirds = [min(reference[start::3]) / min(seconds[start::3]) for start in range(3)]
    return Speedup(min(reference) / min(seconds), min(thirds), max(thirds))


def time_rounds(calls: Mapping[str, Callable[[], Any]], clock: Callable[[], float] = time.perf_counter) -> Any:
    """Times all calls in each round, in rotating order, so that other load slows them alike."""
    seconds = {key: [] for key in calls}
    order, start = list(calls), clock()
    for i in range(ROUNDS):
        if i >= FEWEST_ROUNDS and clock() - start > MOST_SECONDS:
            break
        for key in order[i % len(order) :] + order[: i % len(order)]:
            begin = clock()
            jax.block_until_ready(calls[key]())
            seconds[key].append(clock() - begin)
    return seconds


def _prepare_matmul(dtype: str, accumulator: str, precision: lax.Precision, size: int) -> Any:
    def matmul(left: jax.Array, right: jax.Array) -> jax.Array:
        if dtype.startswith("float8"):  # XLA recognizes upcast, scale, multiply as a float8 matmul
            left, right = (x.astype(accumulator) * jnp.ones((), accumulator) for x in (left, right))
        return lax.dot(left, right, precision=precision, preferred_element_type=jnp.dtype(accumulator))

    try:
        return _compile(matmul, *[jnp.ones((size, size), dtype)] * 2)
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # the device has no such matmul
        return None


def _prepare_step(dtype: str, rows: int, width: int) -> Any:
    def loss_fn(expand: jax.Array, contract: jax.Array, x: jax.Array) -> jax.Array:
        y = x + jax.nn.gelu(x @ expand.astype(dtype)) @ contract.astype(dtype)
        return jnp.square(y.astype(jnp.float32)).mean()

    weights = [jnp.full(shape, 0.01) for shape in ((width, 4 * width), (4 * width, width))]
    return _compile(jax.grad(loss_fn, (0, 1)), *weights, jnp.ones((rows, width), dtype))


def _compile(function: Callable[..., Any], *args: Any) -> Any:
    compiled = jax.jit(function).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    return functools.partial(compiled, *args)


_HLO_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "s32": "int32"}
_HLO_DTYPES |= {"f8e4m3fn": "float8_e4m3fn"}
_VALUE = re.compile(r"%?([\w.-]+) = (\w+)\[")
_LIBRARY = r'custom-call(?=.*custom_call_target="[^"]*(?:gemm|matmul))'  # of cuBLAS, hipBLASLt, oneDNN
_OPERAND = r"(?:\w+\[[^ ]* )?%?([\w.-]+)"
_MATMUL = re.compile(rf" (?:dot|convolution|{_LIBRARY})\({_OPERAND}, {_OPERAND}")


def read_matmuls(text: str | None) -> list[str]:
    """Returns the operand dtype of each matmul of an HLO module, without matmuls of two dtypes."""
    dtypes = {name: _HLO_DTYPES.get(dtype) for name, dtype in _VALUE.findall(text or "")}
    pairs = [(dtypes.get(left), dtypes.get(right)) for left, right in _MATMUL.findall(text or "")]
    return [left for left, right in pairs if left is not None and left == right]


def recommend_policy(matmuls: Iterable[MatmulRate], steps: Mapping[str, StepTime], machine: Machine) -> tuple[str, str]:
    """Recommends a policy by step times, with the reason; bfloat16 first, as it needs no loss scale."""
    rates, descriptions = {rate.name: rate for rate in matmuls}, list[str]()
    verdicts = {dtype: steps[dtype].speedup.verdict for dtype in HALF_DTYPES}
    for dtype, verdict in verdicts.items():
        alone = "no matmuls" if rates[dtype].teraflops is None else f"matmuls alone {rates[dtype].speedup:.2f}x"
        note = f"a tie; {alone}" if verdict == "tie" else alone
        descriptions.append(f"{steps[dtype].speedup.value:.2f}x the speed of float32 in {dtype} ({note})")
    ratios = f"forward and backward run at {' and '.join(descriptions)}"
    if "faster" not in verdicts.values():
        heads = {"slower": "is slower here", "tie": "gains no time here, within the noise"}
        how = heads[verdicts["float16"]] if len(set(verdicts.values())) == 1 else "gains no time here"
        causes = [_explain_slow(rates[dtype], steps[dtype], machine) for dtype in HALF_DTYPES]
        if all(rates[dtype].multiplied_in == "float32" for dtype in HALF_DTYPES):
            causes = [f"jaxlib {machine.versions['jaxlib']} computes the matmuls of both by converting to float32"]
        return "float32", f"half precision {how}: {ratios}; {'; '.join(causes)}"
    bfloat16, float16 = (steps[dtype].speedup for dtype in HALF_DTYPES)
    gains = float16.low > bfloat16.high and float16.value > FLOAT16_GAIN * bfloat16.value
    dtype, reason = "bfloat16", "bfloat16 has the range of float32, so it needs no loss scale"
    if verdicts["float16"] == "faster" and (gains or verdicts["bfloat16"] != "faster"):
        dtype, reason = "float16", "float16 has a small range, so it needs a dynamic loss scale"
    return f"params=float32,compute={dtype},output=float32", f"{ratios}; {reason}"


def _explain_slow(rate: MatmulRate, step: StepTime, machine: Machine) -> str:
    dtype, jaxlib = rate.dtype, f"jaxlib {machine.versions['jaxlib']}"
    if rate.speedup is None:
        return f"{jaxlib} has no matmul in {dtype} for this device"
    if rate.multiplied_in == "float32":
        return f"{jaxlib} computes {dtype} matmuls by converting to float32"
    if rate.speedup > 1 + TIE:
        wide = step.multiplied_in.get("float32", 0)
        also = f", in which {wide} of {sum(step.multiplied_in.values())} matmuls are in float32" if wide else ""
        return f"{dtype} matmuls are quick here, but the rest of the step is not{also}"
    leaves = f"{jaxlib} leaves {dtype} matmuls in {dtype}, but they"
    reason = f"{leaves if rate.multiplied_in == dtype else f'{dtype} matmuls'} run no faster than in float32"
    names = None if machine.half_instructions is None else machine.half_instructions[dtype]
    listed = f"although Linux lists {' and '.join(names)}" if names else f"and Linux lists no {dtype} instructions"
    return reason if names is None else f"{reason}, {listed} for this CPU"
