"""The command line: `jmp-policy`, the same as `python -m jmp_policy`."""

from ._main import main as main
