"""The facts of a lock that XLA decides: the dtypes that a compiled program computes in."""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.extend.core import jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh, SingleDeviceSharding

from .._jaxpr import ObservedCall
from ._audit_report import PLATFORMS, parse_platform
from ._collectives import find_meshes
from ._hlo import Instruction, Module, make_unique, parse_module
from ._lock_facts import (
    OPERATIONS,
    Described,
    Tally,
    add_collectives,
    describe_cast,
    describe_matmul,
    describe_rounding,
    is_inexact,
)
from ._lock_rows import LockRow
from ._partitioned import Reader, list_sites, read_module, read_stack
from ._traced import FindPlace


def compile_rows(call: ObservedCall, find_place: FindPlace, platform: str) -> tuple[list[LockRow], str]:
    """Returns the facts of a program that is compiled for a platform, and the name of the device."""
    meshes = find_meshes(call.program.jaxpr, call.leaves)
    leaves, device = _place(call.leaves, platform, is_sharded=meshes.devices > 1)
    module = parse_module(_compile_to_text(jaxpr_as_fun(call.program), leaves, device))
    shapes = [mesh.shape for mesh in meshes.concrete]
    tally, reader = Tally(), Reader(module, shapes, meshes.devices, find_place)
    for made, runs, _ in list_sites(module, module.computations[module.entry]):
        described = _describe(made, module, reader, platform)
        if described is not None and runs:
            place = find_place(read_stack(reader.find_named(made).op_name))
            tally.add(*place, described, runs, lambda made=made: reader.find_line(made))
    if meshes.devices > 1:
        add_collectives(tally, read_module(module, shapes, meshes.devices, find_place)[0])
    return tally.list_rows(), device


def _compile_to_text(run: Callable[..., Any], leaves: Sequence[Any], device: str) -> str:
    """Returns the optimized HLO of a program, under a name of its own: a cached one may have scopes of another."""
    try:
        text = jax.jit(make_unique(run, "lock")).lower(*leaves).compile().as_text()
    except (RuntimeError, ValueError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"XLA cannot compile the program for {device}: {said}. Lock the traced program. For example: "
            "lock(fun)(*args)."
        ) from error
    assert text is not None
    return text


def find_platform(leaves: Iterable[Any]) -> str:
    """Returns the platform of the described devices that arguments are on, or else of this process."""
    described = _find_described(leaves)
    name = jax.default_backend() if described is None else described.platform
    return parse_platform(name) if name in ("gpu", *PLATFORMS) else "cpu"


def _find_described(leaves: Iterable[Any]) -> Any:
    """Returns a device of the mesh that `jax.ShapeDtypeStruct`s are sharded over, or None."""
    shapes = (leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct))
    meshes = (getattr(shape.sharding, "mesh", None) for shape in shapes)
    return next((mesh.devices.flat[0] for mesh in meshes if isinstance(mesh, Mesh)), None)


def _place(leaves: Sequence[Any], platform: str, *, is_sharded: bool) -> tuple[Sequence[Any], str]:
    """Puts arguments on a device of the platform, which for a TPU need not be there. Returns its name, too."""
    described, here = _find_described(leaves), _find_devices(platform)
    if platform == find_platform(leaves):
        return leaves, (described or here[0]).device_kind
    if is_sharded:
        raise ValueError(
            f"The arguments are on a mesh of other devices than the program is to be compiled for, {platform}. Give "
            "them shardings on such devices, described or there. For example: "
            "jax.experimental.topologies.get_topology_desc('v5e:2x2', 'tpu').devices."
        )
    if not here and platform != "tpu":
        raise ValueError(
            f"There is no {platform} here to compile for. Lock the traced program, or compile where the device is. "
            f"For example: lock(fun, platform={platform!r})(*args)."
        )
    device = here[0] if here else _describe_tpu()
    sharding = SingleDeviceSharding(device)
    return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in leaves], device.device_kind


def _find_devices(platform: str) -> Sequence[Any]:
    try:
        return jax.devices(platform)
    except RuntimeError:
        return ()


def _describe_tpu() -> Any:
    try:
        with _without_metadata_server():
            options = {"chips_per_host_bounds": (1, 1, 1)}
            return topologies.get_topology_desc("v5e:1x1", "tpu", **options).devices[0]
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"No TPU was found here, and no compiler for one ({said}): pip install libtpu, or lock the traced program. "
            "For example: lock(fun, platform='tpu')(*args)."
        ) from error


_TPU_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may compile, too, since none runs anything
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@contextlib.contextmanager
def _without_metadata_server() -> Iterator[None]:
    """Tells libtpu, which reads the environment while it is loaded, about the TPU that it would look for."""
    given = {name: text for name, text in _TPU_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)


def _describe(made: Instruction, module: Module, reader: Reader, platform: str) -> Described | None:
    """Describes an instruction, in the words of `_lock_facts`."""
    dtypes = [array.dtype for array in made.arrays]
    read = [_find_dtype(module, operand) for operand in made.operands]
    size = max((math.prod(array.shape) for array in made.arrays), default=0)
    if made.opcode == "convert":
        return describe_cast(read[0], dtypes[0], size)
    if made.opcode in ("dot", "convolution", "ragged-dot", "scaled-dot"):
        return describe_matmul(read[:2], dtypes[0], _read_precision(made), platform)
    if not any(map(is_inexact, (*dtypes, *read))):
        return None
    if made.opcode == "reduce-precision":
        exponent, mantissa = map(int, re.findall(r"(?:exponent|mantissa)_bits=(\d+)", made.attributes))
        return describe_rounding(dtypes[0], exponent, mantissa, size)
    if made.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', made.attributes)
        name = target[1] if target else made.opcode
        return None if name in _MOVING else Described("kernel", f"{name} {' '.join(read)} -> {' '.join(dtypes)}")
    name = _SUMS.get((made.opcode, reader.find_reduction(made) if made.opcode in _REDUCING else ""))
    if name is not None:
        return Described("sum", f"{name} in {dtypes[0]}", _count_terms(made, module, size))
    name = _NAMES.get(made.opcode, made.opcode)
    if name in OPERATIONS:
        return Described("operation", f"{name} in {dtypes[0]}")
    return Described("arithmetic", f"in {dtypes[0]}", size) if made.opcode in _ARITHMETIC and size > 1 else None


_NAMES = {
    "exponential": "exp", "exponential-minus-one": "expm1", "log-plus-one": "log1p", "power": "pow", "sine": "sin",
    "cosine": "cos",
}  # fmt: skip
"""The names of JAX's primitives by HLO opcode, where they differ."""

_REDUCING = ("reduce", "reduce-window", "scatter")
_SUMS = {
    ("reduce", "sum"): "reduce_sum", ("reduce", "product"): "reduce_prod",
    ("reduce-window", "sum"): "reduce_window_sum", ("scatter", "sum"): "scatter-add",
}  # fmt: skip
_ARITHMETIC = frozenset(
    ["abs", "add", "clamp", "divide", "maximum", "minimum", "multiply", "negate", "remainder", "subtract"]
)


_MOVING = {
    "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart", "ConcatBitcast",
    "GatherScatterIndicesBitpacked", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "SliceToDynamic",
    "PadToStatic", "X64Combine", "X64SplitHigh", "X64SplitLow",
}  # fmt: skip
"""Custom calls that compute nothing."""


def _count_terms(made: Instruction, module: Module, size: int) -> int:
    """Counts the elements that one element of a sum adds; of a scatter, which depends on its indices, 1."""
    if made.opcode == "scatter":
        return 1
    window = re.search(r"window=\{size=([\dx]+)", made.attributes)
    if window:
        return math.prod(map(int, window[1].split("x")))
    name, part = made.operands[0]
    return math.prod(module.instructions[name].arrays[part or 0].shape) // max(size, 1)


def _find_dtype(module: Module, operand: Any) -> str:
    arrays = module.instructions[operand.name].arrays
    return arrays[operand.part or 0].dtype if arrays else "token"


def _read_precision(made: Instruction) -> str | None:
    found = re.search(r"operand_precision=\{(\w+)", made.attributes)
    algorithm = re.search(r"algorithm=dot_(\w+)", made.attributes)
    if algorithm:
        return algorithm[1].upper()
    return found[1].upper() if found and found[1] != "default" else None
