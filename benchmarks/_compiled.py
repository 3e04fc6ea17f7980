"""Costs of a compiled program as XLA reports them, and the matmuls that the compiler chose."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jaxlib import _jax


@dataclasses.dataclass(frozen=True)
class Figures:
    """XLA's analysis of a compiled program. It is the same each time that the program is compiled.

    Attributes:
      flops: floating-point operations.
      bytes_accessed: bytes that its operations read and write; a fusion counts once.
      temporaries: bytes of temporary buffers.
      peak: bytes of the most memory that is in use at once, arguments and results included.
      aliased: bytes of results that are written into donated arguments.
    """

    flops: float
    bytes_accessed: float
    temporaries: float
    peak: float
    aliased: float

    def per(self, unit: float) -> "Figures":
        """The figures in multiples of a unit."""
        return Figures(*(figure / unit for figure in dataclasses.astuple(self)))

    def over(self, other: "Figures") -> "Figures":
        """The ratios of these figures to others."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Figures(*(mine / its if its else 1.0 if mine == its else math.inf for mine, its in pairs))


def compile_for_figures(lowered: Any) -> Any:
    """Compiles a lowered program, which will not be run, for its `cost_analysis` and `memory_analysis`.

    These are of the optimized HLO and of its buffers. On a CPU, half of the compile time goes into the optimization of
    the machine code. Without it, the metrics are the same to the byte.
    """
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return lowered.compile(compiler_options=options)


def figures(compiled: Any) -> Figures:
    """The figures of a compiled program, a `jax.stages.Compiled` for any device."""
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    if cost is None:
        cost = _analyze_for_cuda(compiled)
    return Figures(
        cost.get("flops", 0.0),
        cost["bytes accessed"],
        memory.temp_size_in_bytes,
        memory.peak_memory_in_bytes,
        memory.alias_size_in_bytes,
    )


def traffic(program: Any) -> Figures:
    """The figures of a `Program`, whose arguments may be `jax.ShapeDtypeStruct`, compiled for this machine."""
    return figures(compile_for_figures(program.lower()))


def count_bytes(tree: Any) -> int:
    """The bytes of the arrays of a tree.

    >>> count_bytes([jax.ShapeDtypeStruct((2, 3), "bfloat16"), jax.ShapeDtypeStruct((), "int32")])
    16
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def count_parameters(params: Any) -> int:
    """The numbers in a tree.

    >>> count_parameters({"w": jax.ShapeDtypeStruct((2, 3), "float32")})
    6
    """
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def products(compiled: Any) -> collections.Counter[str]:
    """Counts the matmuls and convolutions of a compiled program by the dtypes of their operands.

    They are read from the optimized HLO, inside of fusions too, so that the compiler's choice shows: "bf16", or
    "f8e4m3fn x f8e5m2" where the two operands differ.
    """
    counted: collections.Counter[str] = collections.Counter()
    for product in _find_products(compiled.as_text()):
        left, right = (operand.dtype for operand in product.operands[:2])
        counted[left if left == right else f"{left} x {right}"] += 1
    return counted


def _analyze_for_cuda(compiled: Any) -> dict[str, float]:
    """Returns the `cost_analysis` of a CUDA program by the CPU's client, since it is `None` for CUDA.

    It knows nothing of cuBLAS and cuDNN. Bytes of theirs are operands and result; operations are cuBLAS's alone.
    """
    (module,) = compiled.runtime_executable().hlo_modules()
    cost = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)  # JAX has no public name for it
    calls = [product for product in _find_products(module.to_string()) if product.library]
    cost["bytes accessed"] += sum(array.nbytes for call in calls for array in (call.result, *call.operands))
    cost["flops"] = cost.get("flops", 0.0) + sum(2 * call.result.size * call.contracted for call in calls)
    return cost


@dataclasses.dataclass(frozen=True)
class _Array:
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> float:
        bits = re.search(r"\d+", self.dtype)  # the first number of "bf16", "s4", "f8e4m3fn"; "pred" has none
        return self.size * (int(bits[0]) if bits else 8) / 8


@dataclasses.dataclass(frozen=True)
class _Product:
    """A matrix product or a convolution; `library` if it is a call of cuBLAS or cuDNN, `contracted` if of cuBLAS."""

    operands: tuple[_Array, ...]
    result: _Array
    library: bool
    contracted: int


_RESULT = re.compile(r"\s*(?:ROOT )?(%\S+) = \(?(\w+)\[([\d,]*)\]")  # of a tuple the first: others are scratch memory
_CALL = re.compile(r" (dot|scaled-dot|convolution|custom-call)\(([^)]*)\)")
_LIBRARY = re.compile(r'custom_call_target="__cu(?:blas|dnn)')
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def _find_products(hlo: str) -> Iterator[_Product]:
    arrays: dict[str, _Array] = {}  # by the name of the instruction, which is unique in its computation, above its use
    for line in hlo.splitlines():
        result = _RESULT.match(line)
        if result is None:
            continue
        name, dtype, shape = result.groups()
        arrays[name] = _Array(dtype, tuple(int(size) for size in shape.split(",") if size))
        call, library = _CALL.search(line), _LIBRARY.search(line)
        if call is None or (call[1] == "custom-call" and library is None):
            continue
        operands = tuple(arrays[operand] for operand in call[2].split(", "))
        axes = _CONTRACTED.search(line)
        contracted = math.prod(operands[0].shape[int(axis)] for axis in re.findall(r"\d+", axes[1])) if axes else 0
        yield _Product(operands, arrays[name], library is not None, contracted)
