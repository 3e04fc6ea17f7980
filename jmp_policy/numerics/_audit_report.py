"""The findings of an audit, and its report: a table of operations, and findings."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from .._base import DTypeLike, did_you_mean, group_by_key, parse_dtype
from .._jaxpr import REMEDY
from ..policy import check_rule_key, covers_path
from ..report import Report, Table, format_bytes, format_count, indent_lines, make_columns, shorten_dtypes

FINDINGS = {
    "float32-matmul": "a matmul or convolution in float32, in a program that has half precision elsewhere",
    "accidental-promotion": "promoted only because one operand is a wider constant, parameter or intermediate, or of "
    "the other half precision",
    "half-reduction": "a sum or product of many numbers in half precision: its error grows with their count",
    "half-cumulative": "a cumulative sum or product in half precision: its error grows along the axis",
    "round-trip-cast": "cast to a wider dtype and back with nothing computed between",
    "float16-exp": "an exponential in float16, which overflows at 11.1",
    "float16-log": "a logarithm in float16, whose argument may have been rounded to zero",
    "float16-softmax": "a softmax in float16: small probabilities become zero",
    "float16-norm": "the root of a sum of squares in float16: squares overflow at 256, and are zero below 2.4e-4",
    "half-logits": "a loss computed from logits in half precision",
    "log-of-softmax": "the logarithm of a softmax that was rounded to half precision: log(0) is -inf",
    "log-of-sigmoid": "the logarithm of a sigmoid that was rounded to half precision: log(0) is -inf",
    "half-gradient": "the gradient of a weight with several uses, added up in half precision",
    "half-update": "an update added to a parameter in half precision: a small one changes nothing",
    "rounded-by-rule": "float32 that autocast rounds because of residuals='half' or a narrow rule of AutocastRules",
    "infinite-constant": "a finite constant that is infinite in the dtype that it is cast to",
    "half-all-reduce": "a sum over devices in half precision",
    "half-sampling": "a random choice by noise in half precision: unlikely tokens are never drawn",
    "rounded-integer": "an integer made from half precision, which may have rounded it",
}
"""The names of findings, and their descriptions."""

REMEDIES = {
    "float32-matmul": "cast what it reads, or give the layer a dtype",
    "accidental-promotion": "cast that operand, or upcast the other one where that is meant",
    "half-reduction": REMEDY,
    "half-cumulative": "cast to float32 first",
    "round-trip-cast": "leave both casts out",
    "float16-exp": "cast to float32 first",
    "float16-log": "cast to float32 first",
    "float16-softmax": "cast to float32 first",
    "float16-norm": "square and sum in float32",
    "half-logits": "cast the logits to float32",
    "log-of-softmax": "use jax.nn.log_softmax of float32 logits",
    "log-of-sigmoid": "use jax.nn.log_sigmoid of float32 logits",
    "half-gradient": "cast the weight at each use, inside of a loop, after a lookup; or add in float32",
    "half-update": "wrap the optimizer in master_weights, kahan or stochastic_rounding",
    "rounded-by-rule": "leave the rule out, or give it fewer scopes, where the digits count",
    "infinite-constant": "use jnp.finfo(x.dtype).min or .max, or -jnp.inf where that is meant",
    "half-all-reduce": "cast to float32 before, and back after",
    "half-sampling": "cast the logits to float32 first",
    "rounded-integer": "pass tokens and indices as integers, name the argument in no_cast, or compute in float32",
}


@dataclasses.dataclass(frozen=True)
class AuditRow:
    """The operations of one kind, in one dtype, at one place.

    Attributes:
      path: the module names and `jax.named_scope`s around them, joined by `/`; the root's is the empty string.
      operation: the name of the primitive.
      dtype: the widest floating dtype that they read; of a conversion, `"float32->bfloat16"`.
      backward: whether they belong to a backward pass.
      count: the number of operations, in all iterations of a loop.
      flops: additions and multiplications, of all iterations and devices.
      bytes: the sum of their inputs and outputs: an upper bound, since XLA fuses operations.

    >>> from jmp_policy.numerics import AuditReport, AuditRow
    >>> product = AuditRow("head", "dot_general", "bfloat16", backward=False, count=2, flops=768, bytes=272)
    >>> print(AuditReport((product,), (), ()))
    module  operation    dtype  pass     count  flops  bytes
    ────────────────────────────────────────────────────────
    head    dot_general  bf16   forward      2    768  272 B
    <BLANKLINE>
    no findings
    """

    path: str
    operation: str
    dtype: str
    backward: bool
    count: int
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The matmuls or convolutions of one source line, in one dtype and place; outer products do not count.

    Attributes:
      operation: the name of the primitive.
      dtypes: the dtypes of its operands.
      dtype: the widest of them, in which it runs.
      source: the user's line that it comes from.
      path: the module names and `jax.named_scope`s around it, joined by `/`.
      backward: whether it belongs to a backward pass.
      count: the number of matmuls; a line in a loop, or in a function that is called again, has many.
      flops: additions and multiplications of all of them.
      precision: the precision as written, such as `"HIGHEST"` or the name of a `jax.lax.DotAlgorithmPreset`; None for
        the default of the platform.

    >>> from jmp_policy.numerics import AuditReport, Matmul
    >>> product = Matmul("dot_general", ("float32", "bfloat16"), "float32", "train.py:12 (loss)", "head", False, 2, 768)
    >>> AuditReport((), (), (product,)).assert_matmuls_in("bfloat16")
    Traceback (most recent call last):
    AssertionError: 2 of 2 matmuls are not in bfloat16:
      train.py:12 (loss): dot_general in head reads float32 and bfloat16, 2 times
    >>> product.effective("tpu"), product.effective("cuda"), product.effective("cpu")
    ('bfloat16', 'TF32', 'float32')
    """

    operation: str
    dtypes: tuple[str, ...]
    dtype: str
    source: str
    path: str
    backward: bool
    count: int
    flops: int
    precision: str | None = None

    def effective(self, platform: str) -> str:
        """Returns what a platform multiplies the operands in.

        Float32 is multiplied in TF32 or bfloat16 where that is faster, unless its precision says otherwise.

        Args:
          platform: `"tpu"`, `"cuda"` (NVIDIA GPUs since Ampere) or `"cpu"`.

        Returns:
          For float32 operands `"float32"`, `"TF32"`, `"bfloat16"`, `"bfloat16 in 3 passes"` or `"bfloat16 in 6
          passes"`; for an algorithm the dtype that it names; else `dtype`.

        Raises:
          ValueError: the platform is unknown.
        """
        dtype = self.dtype if self.dtype in self.dtypes else self.dtypes[0]  # integers are summed in another one
        return find_effective_precision(dtype, self.precision, platform)


PLATFORMS = ("cpu", "tpu", "cuda")

_FLOAT32_IN = {
    "cpu": dict.fromkeys((None, "HIGH", "HIGHEST"), "float32"),
    "tpu": {None: "bfloat16", "HIGH": "bfloat16 in 3 passes", "HIGHEST": "bfloat16 in 6 passes"},
    "cuda": {None: "TF32", "HIGH": "TF32", "HIGHEST": "float32"},
}
"""What float32 operands are multiplied in, by platform and precision."""

_EXACT = ("float32", "bfloat16 in 6 passes", "bfloat16 in 9 passes")
"""Results that are as exact as float32 products."""


def find_effective_precision(dtype: str, precision: str | None, platform: str) -> str:
    """Returns what a platform multiplies in: for float32 `"TF32"` or passes of bfloat16, else `dtype` itself.

    >>> find_effective_precision("float32", "HIGHEST", "tpu"), find_effective_precision("float32", None, "cuda")
    ('bfloat16 in 6 passes', 'TF32')
    >>> find_effective_precision("float32", "BF16_BF16_F32_X3", "cuda")
    'bfloat16 in 3 passes'
    """
    platform = parse_platform(platform)
    if precision and ", " in precision:  # of each operand: the least counts
        precision = None if "DEFAULT" in precision else "HIGH"
    if precision is not None and precision not in _FLOAT32_IN[platform]:  # the name of an algorithm
        first, *others = precision.split("_")
        passes = [f" in {name[1:]} passes" for name in others[-1:] if re.fullmatch(r"X\d+", name)]
        return "".join([_ALGORITHMS.get(first, precision), *passes])
    effective = _FLOAT32_IN[platform][precision] if dtype in ("float32", "complex64") else dtype
    return dtype if effective == "float32" else effective


_ALGORITHMS = {
    "ANY": "float8",
    "F16": "float16",
    "BF16": "bfloat16",
    "TF32": "TF32",
    "F32": "float32",
    "F64": "float64",
}


def parse_platform(platform: str) -> str:
    """Returns the name in `PLATFORMS`. JAX calls the backend of `"cuda"` `"gpu"`."""
    if platform != "gpu" and platform not in PLATFORMS:
        raise ValueError(f"Unknown platform {platform!r}. {did_you_mean(str(platform), PLATFORMS)} For example: 'tpu'.")
    return "cuda" if platform == "gpu" else platform


@dataclasses.dataclass(frozen=True)
class Finding:
    """A likely loss of precision or time.

    Attributes:
      id: its name, a key of `numerics.FINDINGS`.
      message: a description, and a fix.
      source: the user's line that it comes from, `"file.py:12 (function)"`.
      path: the module names and `jax.named_scope`s around it, joined by `/`.
      dtypes: the dtypes that take part.
      backward: whether it is in a backward pass.
      count: the number of equations of that line that have it.

    >>> from jmp_policy.numerics import Finding
    >>> message = "an exponential in float16, which overflows at 11.1 (exp); cast to float32 first"
    >>> print(Finding("float16-exp", message, "train.py:12 (loss)", "head", ("float16",), backward=False, count=1))
    train.py:12 (loss): float16-exp in head: an exponential in float16, which overflows at 11.1 (exp); cast to float32
    first
    """

    id: str
    message: str
    source: str
    path: str
    dtypes: tuple[str, ...]
    backward: bool
    count: int

    def __str__(self) -> str:
        where = f" in {self.path}" if self.path else ""
        return f"{self.source}: {self.id}{where}{', backward' if self.backward else ''}: {self.message}"


@dataclasses.dataclass(frozen=True, repr=False)
class AuditReport(Report):
    """Result of `numerics.audit`: a table in a terminal, and in a notebook.

    Attributes:
      rows: one for each place, operation and dtype, in the order of the program.
      findings: likely losses of precision or time, in the order of the program.
      matmuls: the matmuls and convolutions.
      uncounted_loops: the lines of `while` loops, whose operations are counted for one iteration.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> report = jmp.numerics.audit(lambda x: jnp.exp(x) @ x)(jax.ShapeDtypeStruct((4, 4), jnp.float16))
    >>> [finding.id for finding in report.findings], report.flops, report.bytes
    (['float16-exp'], 144, 160)
    >>> report.matmul_shares
    {'float16': 1.0}
    >>> report
    <AuditReport: 2 rows, 1 matmuls, 1 findings; print it for the table>
    >>> report.assert_no("float16-softmax")
    """

    rows: tuple[AuditRow, ...]
    findings: tuple[Finding, ...]
    matmuls: tuple[Matmul, ...]
    uncounted_loops: tuple[str, ...] = ()

    _properties = ("flops", "bytes")

    @property
    def flops(self) -> int:
        """Additions and multiplications of all rows."""
        return sum(row.flops for row in self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def matmul_shares(self) -> dict[str, float]:
        """Share of the flops of `matmuls`, by dtype."""
        work = dict.fromkeys((matmul.dtype for matmul in self.matmuls), 0)
        for matmul in self.matmuls:
            work[matmul.dtype] += matmul.flops
        total = max(1, sum(work.values()))  # an empty matrix has no flops
        return {dtype: flops / total for dtype, flops in work.items()}

    def assert_matmuls_in(
        self, dtype: DTypeLike, *, exactly: bool = False, platform: str | None = None, path: str = ".*"
    ) -> None:
        """Checks that every matmul and convolution runs in a dtype, forward and backward.

        Args:
          dtype: any spelling of a dtype that `get_policy` reads.
          exactly: whether float32 that is multiplied in TF32, or in fewer than 6 passes of bfloat16, fails, too.
          platform: for `exactly`, the platform that multiplies: `"tpu"`, `"cuda"` or `"cpu"`.
          path: a pattern of the paths that are checked, with everything inside them, like a key of a `PolicyMap`.

        Raises:
          AssertionError: one runs in another dtype, and the message has its line; or there is none.
          ValueError: `dtype` is not a floating dtype, or `exactly` has no platform, or a platform no `exactly`.
        """
        wanted = str(parse_dtype(dtype))
        if bool(exactly) is (platform is None):
            raise ValueError(f"exactly={exactly} with platform={platform!r}: each needs the other. {_EXACTLY}")
        platform = None if platform is None else parse_platform(platform)
        check_rule_key(path, "path= of assert_matmuls_in")
        matmuls = [matmul for matmul in self.matmuls if covers_path(path, matmul.path) is not None]
        where = "" if path == ".*" else f" in {path}"
        if not matmuls:
            raise AssertionError(
                f"The program has neither a matmul nor a convolution{where}, in {wanted} or another dtype."
            )
        others = [matmul for matmul in matmuls if matmul.dtype != wanted]
        if others:
            counts = f"{_count_matmuls(others)} of {_count_matmuls(matmuls)}"
            raise AssertionError(f"{counts} matmuls{where} are not in {wanted}:{_list_matmuls(others)}")
        if platform is None:
            return
        exact = (wanted, *_EXACT) if wanted == "float32" else (wanted,)
        others = [matmul for matmul in matmuls if matmul.effective(platform) not in exact]
        if others:
            counts = f"{_count_matmuls(others)} of {_count_matmuls(matmuls)}"
            lines = _list_matmuls(others, lambda matmul: f", multiplied in {matmul.effective(platform)}")
            raise AssertionError(f"{counts} matmuls{where} are not exactly in {wanted} on {platform}:{lines}{_HIGHEST}")

    def assert_no(self, *ids: str) -> None:
        """Checks that the audit has no finding of these names, or no finding at all if called without names.

        Raises:
          AssertionError: there is a finding; the message has the lines.
          ValueError: a name is not in `numerics.FINDINGS`.
        """
        for name in ids:
            if name not in FINDINGS:
                raise ValueError(f"Unknown finding {name!r}. {did_you_mean(name, FINDINGS)} {_EXAMPLE}")
        found = [finding for finding in self.findings if not ids or finding.id in ids]
        if found:
            raise AssertionError(f"{len(found)} {'finding' if len(found) == 1 else 'findings'}:{indent_lines(found)}")

    def _summarize(self) -> str:
        return f"{len(self.rows)} rows, {_count_matmuls(self.matmuls)} matmuls, {len(self.findings)} findings"

    def _list_tables(self, width: int | None) -> list[Table]:
        tables = [_make_matmul_table(self.matmuls)] if self.matmuls else []
        dearest = self._keep_largest(self.rows, lambda row: (row.flops, row.bytes))
        return [*tables, _make_operation_table(dearest)] if self.rows or width is None else tables

    def _list_notes(self) -> list[str]:
        notes = self._note_left_out(self.rows, "rows of less work")
        notes += [f"{line}: the body of this while loop counts once." for line in self.uncounted_loops]
        return [*notes, *map(str, self.findings)] if self.findings else [*notes, "no findings"]


_EXAMPLE = "For example: report.assert_no('float32-matmul')."
_EXACTLY = "For example: report.assert_matmuls_in('float32', exactly=True, platform='tpu')."
_HIGHEST = (
    "\nSet precision=highest in the policy of these layers, precision= in the call, or "
    "jax.default_matmul_precision('highest') around the code."
)


def _count_matmuls(matmuls: Iterable[Matmul]) -> int:
    return sum(matmul.count for matmul in matmuls)


def _list_matmuls(matmuls: Iterable[Matmul], note: Callable[[Matmul], str] = lambda matmul: "") -> str:
    return indent_lines(_describe_matmul(matmul) + note(matmul) for matmul in matmuls)


def _describe_matmul(matmul: Matmul) -> str:
    where = f" in {matmul.path}" if matmul.path else ""
    direction = "backward " if matmul.backward else ""
    times = f", {matmul.count} times" if matmul.count > 1 else ""
    return f"{matmul.source}: {direction}{matmul.operation}{where} reads {' and '.join(matmul.dtypes)}{times}"


def _make_matmul_table(matmuls: Sequence[Matmul]) -> Table:
    """Returns a table with the number and work of matmuls in each dtype and precision."""
    total = sum(matmul.flops for matmul in matmuls)
    rows = []
    named = ((" ".join(filter(None, (matmul.dtype, matmul.precision))), matmul) for matmul in matmuls)
    for name, group in group_by_key(named).items():
        backward = _count_matmuls(matmul for matmul in group if matmul.backward)
        counts = str(_count_matmuls(group) - backward), str(backward)
        work = sum(matmul.flops for matmul in group)
        rows.append((name, *counts, format_count(work), f"{work / total:.1%}" if total else ""))
    return Table(make_columns("matmuls in", "forward, backward, flops, of all"), rows)


def _make_operation_table(rows: Iterable[AuditRow]) -> Table:
    cells = [
        (
            row.path,
            row.operation,
            "->".join(shorten_dtypes([dtype]) for dtype in row.dtype.split("->")),
            "backward" if row.backward else "forward",
            str(row.count),
            format_count(row.flops),
            format_bytes(row.bytes),
        )
        for row in rows
    ]
    return Table(make_columns("module, operation, dtype, pass", "count, flops, bytes"), cells)
