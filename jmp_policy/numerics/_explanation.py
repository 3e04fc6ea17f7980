"""The explanation: a row per module, notes on the rules, and totals."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from .._base import group_by_key, list_paths_to
from .._jaxpr import REMEDY
from ..policy import Policy
from ..quant import Layout
from ..report import (
    Column,
    Plain,
    Report,
    Table,
    find_row,
    format_bytes,
    is_fitting,
    list_places,
    name_place,
    shorten_dtypes,
    shorten_policy,
)


@dataclasses.dataclass(frozen=True)
class ModuleRow(Plain):
    """The policy of one module, and the dtypes that were seen there; or a weight of a module's own code.

    Attributes:
      path: the module names joined by `/`; the root's is the empty string.
      type: the name of its class.
      policy: the policy that holds for it, or `None`.
      rule: where the policy came from: the key of a map's rule, `"default"` where no rule covers the module, `"its own
        policy"`, `"inherited"` from the module around it, `"author's dtype"`, `"force_full_precision"`, or the empty
        string without a policy.
      param_dtypes: the dtypes of its own parameters; the modules inside have rows of their own. So does each parameter
        of two or more axes under a quantized policy, in a module of your own.
      input_dtypes: the dtypes of the arrays it was called with, before any cast.
      compute_dtypes: the dtypes that the operations in its own code read; conversions do not count.
      output_dtypes: the dtypes of the arrays it returned, after any cast.
      param_bytes: the size of its own parameters.
      float32_bytes: their size if they were float32.
      leaks_into: the paths of the modules whose own code computes in a wider dtype than is meant there, because this
        module, which a rule or its author names, returned it.
      quantization: the format of its weight under a quantized policy, such as `"int8"`, or why the weight is left as
        it is: `"left: 64 elements are fewer than min_size=4096"`; the empty string without such a policy or weight.
        For float8 it says what this very call computed its products in.
      half_sums: the sums and products of many numbers that its own code takes in half precision, such as
        `"reduce_window_sum of 4096 numbers in bfloat16"`, a global `nn.avg_pool`: their errors grow with the count.
      accumulate_dtype: the dtype in which its products handed over their sums, if its policy has another one for these
        than it computes in; else the empty string, as for a layer whose author wrote how it multiplies.
      output_cast: the narrower dtype to which the model casts what this module returned, at its own output, if a rule
        or its author names the module; else the empty string.
      precision_faults: sentences about a softmax in half precision in its own code, and about constants and parameters
        that promote its values to float32, such as an adapter that is read by `get_raw_value`. `numerics.audit` has the
        lines.
      is_weight: true for the row of one parameter, whose `path` ends with its name.
      layout: of such a weight, the axes that share a scale if `quantize` stores it, or `None` if that is not possible.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import linen as nn
    >>> model = jmp.with_policy(nn.Dense(2), "mixed_bfloat16")
    >>> row = jmp.explain(model, jax.ShapeDtypeStruct((8, 3), jnp.float32))[""]
    >>> row.type, row.rule, row.param_dtypes, row.compute_dtypes
    ('Dense', 'its own policy', ('float32',), ('bfloat16',))
    """

    path: str
    type: str
    policy: Policy | None
    rule: str
    param_dtypes: tuple[str, ...]
    input_dtypes: tuple[str, ...]
    compute_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    param_bytes: int
    float32_bytes: int
    leaks_into: tuple[str, ...]
    quantization: str = ""
    half_sums: tuple[str, ...] = ()
    accumulate_dtype: str = ""
    output_cast: str = ""
    precision_faults: tuple[str, ...] = ()
    is_weight: bool = False
    layout: Layout | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Report):
    """Result of `jmp_policy.explain`: a table in a terminal, and in a notebook.

    Attributes:
      rows: one for each module, the root first.
      unused: a sentence for each rule of a map that decided for no module.
      unknown: a sentence for each module whose place in the model is not known: its caller runs it through linen's
        `.apply`, and does not hold it.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> from flax import linen as nn
    >>> model = jmp.with_policy(nn.Dense(2), "mixed_bfloat16")
    >>> print(jmp.explain(model, jax.ShapeDtypeStruct((8, 3), jnp.float32)))
    module  type   policy          rule            param  in   compute  out   bytes
    ───────────────────────────────────────────────────────────────────────────────
    Dense   Dense  mixed_bfloat16  its own policy  f32    f32  bf16     bf16   32 B
    <BLANKLINE>
    parameters: 32 B, 100% of what they would take in float32
    """

    rows: tuple[ModuleRow, ...]
    unused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    _properties = ("total_bytes", "float32_bytes")

    @property
    def total_bytes(self) -> int:
        """Size of all parameters."""
        return sum(row.param_bytes for row in self.rows)

    @property
    def float32_bytes(self) -> int:
        """Size of all parameters if they were float32."""
        return sum(row.float32_bytes for row in self.rows)

    def __getitem__(self, path: str) -> ModuleRow:
        """Returns the row of the module at a path."""
        return find_row(self.rows, path, "module", "explained")

    def _summarize(self) -> str:
        return f"{sum(not row.is_weight for row in self.rows)} modules"

    def _list_tables(self, width: int | None) -> list[Table]:
        rows, headers = self.rows, ["module", "type", *_HEADERS]
        quantization = ["quantization"] if any(row.quantization for row in rows) else []
        if width is None:
            headers = ["module", "type", "policy", *_HEADERS, *quantization, "leaks into"]
            return [_make_module_table(rows, headers, module=lambda row: row.path)]
        indent = functools.partial(_indent, paths={row.path for row in rows})
        modules = _make_module_table(rows, headers, gap=1, module=indent)
        if all(row.policy is None for row in rows):
            return [modules]
        whole = _make_module_table(rows, ["module", "type", "policy", *_HEADERS, *quantization], module=indent)
        if is_fitting(whole, width):
            return [whole]
        # A narrow terminal has a table of the policies, and one of quantized weights. Where there is not room even for
        # the rules, that table has their names, and the one of the modules has numbers.
        rules: dict[Rule, None] = dict.fromkeys((row.rule, row.policy) for row in rows if row.policy is not None)
        numbers = {} if is_fitting(modules, width) else {rule: i for i, rule in enumerate(rules, start=1)}
        name_rule = lambda row: str(numbers.get((row.rule, row.policy), row.rule))
        modules = _make_module_table(rows, headers, gap=1, module=indent, rule=name_rule)
        return [modules, _make_rule_table(rows, numbers), *(_make_quantization_table(rows) for _ in quantization)]

    def _list_notes(self) -> list[str]:
        total, float32 = self.total_bytes, self.float32_bytes
        size = "no parameters"
        if float32:
            size = f"parameters: {format_bytes(total)}, {total / float32:.0%} of what they would take in float32"
        casts = [
            f"{row.path} returns {shorten_dtypes(row.output_dtypes)}, and the output dtype of the whole model casts it "
            f"to {shorten_dtypes((row.output_cast,))}; give the model an output dtype of {row.output_dtypes[0]} to "
            "keep it"
            for row in self.rows
            if row.output_cast
        ]
        leaks = group_by_key(((row.rule, row.policy), row) for row in self.rows if row.leaks_into)
        by_sum = group_by_key((half_sum, row.path) for row in self.rows for half_sum in row.half_sums)
        by_fault = group_by_key((fault, row.path) for row in self.rows for fault in row.precision_faults)
        growing = f"whose error grows with their count; {REMEDY}"
        return [
            size,
            *(_describe_leak(self, rows) for rows in leaks.values()),
            *casts,
            *(f"{list_places(paths)} (!): {half_sum}, {growing}" for half_sum, paths in by_sum.items()),
            *(f"{list_places(paths)} (!): {fault}" for fault, paths in by_fault.items()),
            *self.unused,
            *self.unknown,
        ]


Rule = tuple[str, Policy | None]
"""The source of a policy, and the policy."""

_HEADERS = ("rule", "param", "in", "compute", "out", "bytes")
"""The columns of every table of modules."""

_NAMES = ("module", "type", "policy", "bytes")
"""The columns whose cells have one line; those of the others are lists and sentences."""

_CELLS: dict[str, Callable[[ModuleRow], str]] = {
    "type": lambda row: row.type,
    "policy": lambda row: shorten_policy(row.policy),
    "rule": lambda row: row.rule,
    "param": lambda row: shorten_dtypes(row.param_dtypes),
    "in": lambda row: shorten_dtypes(row.input_dtypes),
    "compute": lambda row: (
        shorten_dtypes(row.compute_dtypes)
        + (f", sums {shorten_dtypes((row.accumulate_dtype,))}" if row.accumulate_dtype else "")
    ),
    "out": lambda row: shorten_dtypes(row.output_dtypes),
    "bytes": lambda row: format_bytes(row.param_bytes),
    "quantization": lambda row: row.quantization,
    "leaks into": lambda row: ", ".join(map(name_place, row.leaks_into)),
}
"""By column: the text for a module."""


def _make_module_table(
    rows: Sequence[ModuleRow], headers: Sequence[str], gap: int = 2, **cells: Callable[[ModuleRow], str]
) -> Table:
    """Returns a table of modules; `cells` replaces functions of `_CELLS`."""
    columns = [Column(header, is_number=header == "bytes", wraps=header not in _NAMES) for header in headers]
    said = _CELLS | cells
    return Table(columns, [[said[header](row) for header in headers] for row in rows], gap)


def _make_rule_table(rows: Sequence[ModuleRow], numbers: Mapping[Rule, int]) -> Table:
    counts = collections.Counter((row.rule, row.policy) for row in rows if row.policy is not None and not row.is_weight)
    cells = [
        (f"{numbers[rule]}: {rule[0]}" if numbers else rule[0], shorten_policy(rule[1]), str(count))
        for rule, count in counts.items()
    ]
    return Table([Column("rule", wraps=True), Column("policy"), Column("modules", is_number=True)], cells)


def _make_quantization_table(rows: Sequence[ModuleRow]) -> Table:
    """Returns a table of formats, and of reasons why a weight is not quantized."""
    places = group_by_key((row.quantization, name_place(row.path)) for row in rows if row.quantization)
    cells = [(quantization, ", ".join(names)) for quantization, names in places.items()]
    return Table([Column("quantization", wraps=True), Column("modules", wraps=True)], cells)


def _indent(row: ModuleRow, paths: set[str]) -> str:
    """Returns the path of a module, indented below its parent; marked if it has a note."""
    around = [outer for outer in list_paths_to(row.path)[1:-1] if outer in paths]
    name = (row.path or row.type) + (" (!)" if row.leaks_into or row.half_sums or row.precision_faults else "")
    return "  " * len(around) + (name.removeprefix(f"{around[-1]}/") if around else name)


def _describe_leak(explanation: Explanation, rows: list[ModuleRow]) -> str:
    """Returns a sentence about the modules of one rule that leak."""
    first, others = rows[0], len(rows) - 1
    into = list(dict.fromkeys(path for row in rows for path in row.leaks_into))
    who = f"{first.path} (!)" + (f" and {others} more" if others else "")
    dtypes = shorten_dtypes(first.output_dtypes)
    spread = f"{who} {'leak' if others else 'leaks'} {dtypes} into the code of {list_places(into)}"
    meant = explanation[into[0]].policy
    if first.policy is None or meant is None or first.rule == "author's dtype":
        return f"{spread}; cast what it returns, where that is not meant"
    return f"{spread}; '{first.policy.with_output_dtype(meant.compute_dtype)}' does not"
