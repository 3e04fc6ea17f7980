"""`python -m jmp_policy`: the command line."""

import sys

from .cli import main

sys.exit(main())
