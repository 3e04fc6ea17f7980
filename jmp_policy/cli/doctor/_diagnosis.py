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

from ... import __version__
from ...report import Report, Table, make_columns

HALF_DTYPES = ("bfloat16", "float16")
PACKAGES = ("jax", "jaxlib", "flax", "optax")
HALF_INSTRUCTIONS = {  # names in /proc/cpuinfo, on x86 and ARM, of instructions that do more than convert
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16", "svebf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
ROUNDS, FEWEST_ROUNDS, MOST_SECONDS = 25, 6, 3.0  # each call needs a quiet moment on a busy machine
TIE = 0.05  # speed-ups nearer to 1 are a tie, however quiet the machine is
BUSY = 0.25  # report more noise than this
FLOAT16_GAIN = 1.1  # how much faster than bfloat16 float16 must be to be worth a loss scale and skipped steps


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device and its software."""

    platform: str
    device: str
    system: str
    versions: Mapping[str, str]
    half_instructions: Mapping[str, tuple[str, ...]] | None = None  # None where the system does not list them

    def __str__(self) -> str:
        device = self.device if self.device.startswith(self.platform) else f"{self.device} ({self.platform})"
        versions = ", ".join(f"{name} {self.versions[name]}" for name in ("jax", "jaxlib"))
        return f"{device}, {self.system}; {versions}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the machine for JSON."""
        instructions = self.half_instructions and {key: list(names) for key, names in self.half_instructions.items()}
        device = {"platform": self.platform, "name": self.device, "system": self.system}
        return {"versions": dict(self.versions), "device": device | {"half_instructions": instructions}}


def find_machine() -> Machine:
    """Describes JAX's default device and its computer."""
    device, cores = jax.devices()[0], os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}, {cores} core{'s' if cores > 1 else ''}"
    if device.platform != "cpu":
        name = f"{jax.device_count()} x {device.device_kind}" if jax.device_count() > 1 else device.device_kind
        return Machine(device.platform, name, system, list_versions())
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    name = facts.get("model name") or platform.processor() or device.device_kind
    return Machine("cpu", name, system, list_versions(), find_half_instructions(facts))


def list_versions() -> dict[str, str]:
    """Returns the versions of jmp_policy, Python, and the packages that it uses."""
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
    if listed is None:
        return None
    return {dtype: tuple(n for n in names if n in listed.split()) for dtype, names in HALF_INSTRUCTIONS.items()}


MATMULS = {
    "float32 highest": ("float32", "float32", lax.Precision.HIGHEST),
    "float32 default": ("float32", "float32", lax.Precision.DEFAULT),
    "bfloat16": ("bfloat16", "bfloat16", lax.Precision.DEFAULT),
    "float16": ("float16", "float16", lax.Precision.DEFAULT),
    "float8_e4m3fn": ("float8_e4m3fn", "bfloat16", lax.Precision.DEFAULT),
    "int8": ("int8", "int32", lax.Precision.DEFAULT),
}
"""The dtype, the dtype of the sums and the precision of each measured matmul, by name."""


@dataclasses.dataclass(frozen=True)
class MatmulRate:
    """Measured rate of a matmul."""

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


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Time of a forward and backward pass."""

    seconds: float
    speedup: Speedup
    multiplied_in: Mapping[str, int] = dataclasses.field(default_factory=dict)  # matmuls per dtype


SIZES = {"cpu": {"matrix": 1024, "rows": 1024, "width": 256}}
"""Sides of the matrices, inputs of the perceptron and their width. A longer call would seldom meet a quiet moment."""

_OTHER_SIZES = {"matrix": 8192, "rows": 8192, "width": 4096}


@dataclasses.dataclass(frozen=True)
class Diagnosis(Report):
    """Measurements of a machine and the recommended policy."""

    machine: Machine
    sizes: Mapping[str, int]
    matmuls: list[MatmulRate]
    steps: dict[str, StepTime]
    policy: str  # the recommendation
    reason: str

    @property
    def noise(self) -> float:
        """Largest relative range of the speed-ups of a step."""
        speedups = [step.speedup for step in self.steps.values()]
        return max((speedup.high - speedup.low) / speedup.value for speedup in speedups)

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis for JSON; the help of `jmp-policy doctor` lists its keys."""
        return {
            **self.machine.to_dict(),
            "sizes": dict(self.sizes),
            "matmuls": [dataclasses.asdict(rate) for rate in self.matmuls],
            "steps": {dtype: dataclasses.asdict(step) for dtype, step in self.steps.items()},
            "recommendation": {"policy": self.policy, "reason": self.reason},
        }

    def _list_tables(self, width: int | None) -> list[Table]:
        matmuls = []
        for rate in self.matmuls:
            cells = ("-", "not supported", "-")
            if rate.teraflops is not None:
                cells = rate.multiplied_in or "?", f"{rate.teraflops:.3g}", f"{rate.speedup:.2f}x"
            matmuls.append((rate.name, *cells))
        steps = []
        for dtype, step in self.steps.items():
            products = ", ".join(f"{count} {name}" for name, count in step.multiplied_in.items())
            steps.append((dtype, products or "?", f"{step.seconds * 1e3:.2f}", f"{step.speedup.value:.2f}x"))
        return [
            Table(make_columns("matmul, XLA multiplies in", "TFLOP/s, over float32"), matmuls),
            Table(make_columns("forward and backward, XLA multiplies in", "ms, over float32"), steps),
        ]

    def _list_notes(self) -> list[str]:
        matrix, rows, width = (self.sizes[name] for name in ("matrix", "rows", "width"))
        perceptron = f"a perceptron of {rows} inputs, {width} x {4 * width}"
        measured = f"Shortest times of a matmul of {matrix} x {matrix} matrices, and of {perceptron}."
        notes = [str(self.machine), measured]
        if self.noise > BUSY:
            busy = f"This machine is busy: speed-ups of the perceptron vary by {self.noise:.0%}."
            notes.append(f"{busy} Run this again when idle.")
        return [*notes, f"Recommended policy: {self.policy}", f"Why: {self.reason}."]


def diagnose() -> Diagnosis:
    """Measures the default device."""
    machine = find_machine()
    sizes = SIZES.get(machine.platform, _OTHER_SIZES)
    matmuls, steps = measure_matmuls(sizes["matrix"]), measure_steps(sizes["rows"], sizes["width"])
    return Diagnosis(machine, sizes, matmuls, steps, *recommend_policy(matmuls, steps, machine))


def measure_matmuls(size: int, names: Iterable[str] = tuple(MATMULS)) -> list[MatmulRate]:
    """Measures square matmuls; `names` include float32 at highest precision."""
    calls = {name: _prepare_matmul(*MATMULS[name], size) for name in names}
    seconds = time_rounds({name: call for name, call in calls.items() if call is not None})
    rates = []
    for name, call in calls.items():
        rate = MatmulRate(name, MATMULS[name][0])
        if call is not None:
            read, best = read_matmuls(call.func.as_text()), min(seconds[name])
            dtype = read[0] if len(read) == 1 else None
            teraflops, speedup = 2 * size**3 / best / 1e12, min(seconds["float32 highest"]) / best
            rate = dataclasses.replace(rate, multiplied_in=dtype, teraflops=teraflops, speedup=speedup)
        rates.append(rate)
    return rates


def measure_steps(rows: int, width: int, dtypes: Iterable[str] = ("float32", *HALF_DTYPES)) -> dict[str, StepTime]:
    """Measures forward and backward passes of a perceptron with float32 parameters, including casts, per dtype."""
    calls = {dtype: _prepare_step(dtype, rows, width) for dtype in dtypes}
    seconds = time_rounds(calls)
    steps = {}
    for dtype, call in calls.items():
        matmuls = dict(Counter(read_matmuls(call.func.as_text())))
        steps[dtype] = StepTime(min(seconds[dtype]), compare_times(seconds["float32"], seconds[dtype]), matmuls)
    return steps


def compare_times(reference: Sequence[float], seconds: Sequence[float]) -> Speedup:
    """Compares shortest times, which show the device and not its other load; needs at least three rounds."""
    thirds = [min(reference[start::3]) / min(seconds[start::3]) for start in range(3)]
    return Speedup(min(reference) / min(seconds), min(thirds), max(thirds))


def time_rounds(
    calls: Mapping[str, Callable[[], Any]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Times all calls in each round, in rotating order, so that other load slows them alike."""
    seconds = {key: [] for key in calls}
    order, start = list(calls), clock()
    for i in range(ROUNDS):
        if i >= FEWEST_ROUNDS and clock() - start > MOST_SECONDS:
            break
        for key in order:
            begin = clock()
            jax.block_until_ready(calls[key]())
            seconds[key].append(clock() - begin)
        order = order[1:] + order[:1]
    return seconds


def _prepare_matmul(dtype: str, accumulator: str, precision: lax.Precision, size: int) -> Any:
    def matmul(left: jax.Array, right: jax.Array) -> jax.Array:
        if dtype.startswith("float8"):  # XLA recognizes upcast, scale, multiply as a float8 matmul
            left, right = (x.astype(accumulator) * jnp.ones((), accumulator) for x in (left, right))
        return lax.dot(left, right, precision=precision, preferred_element_type=jnp.dtype(accumulator))

    try:
        matrix = jnp.ones((size, size), dtype)
        return _compile(matmul, matrix, matrix)
    except (jax.errors.JaxRuntimeError, NotImplementedError):  # the device has no such matmul
        return None


def _prepare_step(dtype: str, rows: int, width: int) -> Any:
    def loss_fn(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        expand, contract = (w.astype(dtype) for w in params)
        y = x + jax.nn.gelu(x @ expand) @ contract
        return jnp.square(y.astype(jnp.float32)).mean()

    params = jnp.full((width, 4 * width), 0.01), jnp.full((4 * width, width), 0.01)
    return _compile(jax.grad(loss_fn), params, jnp.ones((rows, width), dtype))


def _compile(function: Callable[..., Any], *args: Any) -> Any:
    compiled = jax.jit(function).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    return functools.partial(compiled, *args)


_HLO_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "s32": "int32"}
_HLO_DTYPES |= {"f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}
_VALUE = re.compile(r"%?([\w.-]+) = (\w+)\[")
_MATMUL = re.compile(r" (?:dot|convolution|custom-call)\((?:\w+\[[^ ]* )?%?([\w.-]+), (?:\w+\[[^ ]* )?%?([\w.-]+)")
_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul)[^"]*"')  # of cuBLAS, hipBLASLt, oneDNN


def read_matmuls(text: str | None) -> list[str]:
    """Returns the operand dtype of each matmul of an HLO module, without matmuls of two dtypes."""
    text, found = text or "", []
    dtypes = dict(_VALUE.findall(text))
    for line in text.splitlines():
        match = _MATMUL.search(line)
        if match is None or ("custom-call(" in line and not _LIBRARY.search(line)):
            continue
        left, right = (_HLO_DTYPES.get(dtypes.get(name, "")) for name in match.groups())
        if left is not None and left == right:
            found.append(left)
    return found


def recommend_policy(matmuls: Iterable[MatmulRate], steps: Mapping[str, StepTime], machine: Machine) -> tuple[str, str]:
    """Recommends a policy by step times, with the reason; bfloat16 first, as it needs no loss scale."""
    rates = {rate.name: rate for rate in matmuls}
    verdicts = {dtype: judge(steps[dtype].speedup) for dtype in HALF_DTYPES}
    descriptions = []
    for dtype in HALF_DTYPES:
        tie = "a tie; " if verdicts[dtype] == "tie" else ""
        alone = "no matmuls" if rates[dtype].teraflops is None else f"matmuls alone {rates[dtype].speedup:.2f}x"
        descriptions.append(f"{steps[dtype].speedup.value:.2f}x the speed of float32 in {dtype} ({tie}{alone})")
    ratios = f"forward and backward run at {' and '.join(descriptions)}"
    faster = [dtype for dtype in HALF_DTYPES if verdicts[dtype] == "faster"]
    if not faster:
        heads = {"slower": "is slower here", "tie": "gains no time here, within the noise"}
        how = heads[verdicts["float16"]] if len(set(verdicts.values())) == 1 else "gains no time here"
        if all(rates[dtype].multiplied_in == "float32" for dtype in HALF_DTYPES):
            cause = f"jaxlib {machine.versions['jaxlib']} computes the matmuls of both by converting to float32"
        else:
            cause = "; ".join(_explain_slow(rates[dtype], steps[dtype], machine) for dtype in HALF_DTYPES)
        return "float32", f"half precision {how}: {ratios}; {cause}"
    float16, bfloat16 = steps["float16"].speedup, steps["bfloat16"].speedup
    gains = float16.low > bfloat16.high and float16.value > FLOAT16_GAIN * bfloat16.value
    if faster == ["float16"] or ("float16" in faster and gains):
        dtype, reason = "float16", "float16 has a small range, so it needs a dynamic loss scale"
    else:
        dtype, reason = "bfloat16", "bfloat16 has the range of float32, so it needs no loss scale"
    return f"params=float32,compute={dtype},output=float32", f"{ratios}; {reason}"


def judge(speedup: Speedup) -> str:
    """Returns "faster", "slower" or "tie"."""
    if speedup.low > 1 and speedup.value > 1 + max(TIE, speedup.high - speedup.low):
        return "faster"
    return "slower" if speedup.high < 1 and speedup.value < 1 - TIE else "tie"


def _explain_slow(rate: MatmulRate, step: StepTime, machine: Machine) -> str:
    dtype, jaxlib = rate.dtype, f"jaxlib {machine.versions['jaxlib']}"
    if rate.teraflops is None:
        return f"{jaxlib} has no matmul in {dtype} for this device"
    if rate.multiplied_in == "float32":
        return f"{jaxlib} computes {dtype} matmuls by converting to float32"
    if rate.speedup is not None and rate.speedup > 1 + TIE:
        wide = step.multiplied_in.get("float32", 0)
        also = f", in which {wide} of {sum(step.multiplied_in.values())} matmuls are in float32" if wide else ""
        return f"{dtype} matmuls are quick here, but the rest of the step is not{also}"
    which = (
        f"{jaxlib} leaves {dtype} matmuls in {dtype}, but they" if rate.multiplied_in == dtype else f"{dtype} matmuls"
    )
    reason = f"{which} run no faster than in float32"
    if machine.half_instructions is None:
        return reason
    names = machine.half_instructions[dtype]
    listed = f"although Linux lists {' and '.join(names)}" if names else f"and Linux lists no {dtype} instructions"
    return f"{reason}, {listed} for this CPU"
