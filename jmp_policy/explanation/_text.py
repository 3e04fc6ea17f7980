"""An explanation as text."""

from rich.console import Console
from rich.table import Table

from ._explanation import Explanation, Row
from ._rendering import rendered, text_table
from ._wording import has_quantization, notes, short, short_policy, size

_WIDE = 100
"""From this many columns on each row has its policy; where there are fewer, a table of the rules has it."""


def as_text(explanation: Explanation) -> str:
    """The table, as wide as the terminal at most; below it totals, leaks, and rules that decided nothing."""
    width = Console().width
    has_policies = any(row.policy is not None for row in explanation.rows)
    parts: list[Table | str] = [_modules(explanation, with_policies=has_policies and width >= _WIDE)]
    if has_policies and width < _WIDE:
        parts.append(_rules(explanation))
    return "\n\n".join(rendered(part, width) for part in (*parts, "\n".join(notes(explanation))))


def _modules(explanation: Explanation, *, with_policies: bool) -> Table:
    policy_column = ["policy"] if with_policies else []
    table = text_table("module", "type", *policy_column, "rule", "param", "in", "compute", "out", gap=1 + with_policies)
    table.add_column("bytes", justify="right", no_wrap=True)
    quantized = has_quantization(explanation)
    if quantized:
        table.add_column("quantization", overflow="fold")
    paths = {row.path for row in explanation.rows}
    for row in explanation.rows:
        dtypes = (row.param_dtypes, row.input_dtypes, row.compute_dtypes, row.output_dtypes)
        policy = [short_policy(row.policy)] if with_policies else []
        name = _indented(row, paths) + (" (!)" if row.leaks_into else "")
        cells = (name, row.type, *policy, row.rule, *map(short, dtypes), size(row.param_bytes))
        table.add_row(*cells, *([row.quantization] if quantized else []))
    return table


def _rules(explanation: Explanation) -> Table:
    table = text_table("rule", "policy", gap=2)
    table.add_column("modules", justify="right")
    holding = [(row.rule, short_policy(row.policy)) for row in explanation.rows if row.policy is not None]
    for rule, policy in dict.fromkeys(holding):
        table.add_row(rule, policy, str(holding.count((rule, policy))))
    return table


def _indented(row: Row, paths: set[str]) -> str:
    """The path of a module under that of the module around it."""
    names = row.path.split("/")
    around = [n for n in range(1, len(names)) if "/".join(names[:n]) in paths]
    name = "/".join(names[around[-1] if around else 0 :]) or row.type
    return "  " * len(around) + name
