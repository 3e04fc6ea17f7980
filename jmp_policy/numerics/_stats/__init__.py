"""Statistics of tensors: measured inside `jit`, collected in rows, shown as tables and plots."""

from ._choice import (
    ObservedProgram as ObservedProgram,
    Value as Value,
    find_program as find_program,
    identify as identify,
)
from ._collect import collect as collect
from ._counting import FIRST_EXPONENT as FIRST_EXPONENT
from ._history import StatsHistory as StatsHistory
from ._row import FormatShares as FormatShares, Row as Row
from ._stats import Stats as Stats
from ._stats_report import format_share as format_share
