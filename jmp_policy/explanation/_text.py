"""An explanation as text."""

from rich.console import Console
from rich.table import Table

from ._explanation import Explanation, Row
from ._rendering import rendered, text_table
from ._wording import has_quantization, notes, place, short, short_policy, size

_WIDE, _WIDER = 100, 150
"""From so many columns on each row has its policy, and its quantization; where there are fewer, tables of their own."""


def as_text(explanation: Explanation) -> str:
    """The table, as wide as the terminal at most; below it totals, leaks, and rules that decided nothing."""
    width = Console().width
    has_policies = any(row.policy is not None for row in explanation.rows)
    quantized = has_quantization(explanation)
    is_wide = width >= (_WIDER if quantized else _WIDE)
    parts: list[Table | str] = [_modules(explanation, with_policies=has_policies and is_wide)]
    if has_policies and not is_wide:
        parts += [_rules(explanation), *([_quantizations(explanation)] if quantized else [])]
    return "\n\n".join(rendered(part, width) for part in (*parts, "\n".join(notes(explanation))))


def _modules(explanation: Explanation, *, with_policies: bool) -> Table:
    policy_column = ["policy"] if with_policies else []
    table = text_table("module", "type", *policy_column, "rule", "param", "in", "compute", "out", gap=1 + with_policies)
    table.add_column("bytes", justify="right", no_wrap=True)
    with_quantization = with_policies and has_quantization(explanation)
    if with_quantization:
        table.add_column("quantization", overflow="fold")
    paths = {row.path for row in explanation.rows}
    for row in explanation.rows:
        dtypes = (row.param_dtypes, row.input_dtypes, row.compute_dtypes, row.output_dtypes)
        policy = [short_policy(row.policy)] if with_policies else []
        name = _indented(row, paths) + (" (!)" if row.leaks_into or row.half_sums else "")
        cells = (name, row.type, *policy, row.rule, *map(short, dtypes), size(row.param_bytes))
        table.add_row(*cells, *([row.quantization] if with_quantization else []))
    return table


def _rules(explanation: Explanation) -> Table:
    table = text_table("rule", "policy", gap=2)
    table.add_column("modules", justify="right")
    holding = [(row.rule, short_policy(row.policy)) for row in explanation.rows if row.policy is not None]
    for rule, policy in dict.fromkeys(holding):
        table.add_row(rule, policy, str(holding.count((rule, policy))))
    return table


def _quantizations(explanation: Explanation) -> Table:
    table = text_table("quantization", "modules", gap=2)
    for quantization in dict.fromkeys(row.quantization for row in explanation.rows if row.quantization):
        paths = [place(row.path) for row in explanation.rows if row.quantization == quantization]
        table.add_row(quantization, ", ".join(paths))
    return table


def _indented(row: Row, paths: set[str]) -> str:
    """The path of a module under that of the module around it."""
    names = row.path.split("/")
    around = [n for n in range(1, len(names)) if "/".join(names[:n]) in paths]
    name = "/".join(names[around[-1] if around else 0 :]) or row.type
    return "  " * len(around) + name
