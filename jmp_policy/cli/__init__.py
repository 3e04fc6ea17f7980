"""The command line: `jmp-policy`, the same as `python -m jmp_policy`."""

from ._command import ToldElsewhere as ToldElsewhere, UserError as UserError
from ._main import main as main
