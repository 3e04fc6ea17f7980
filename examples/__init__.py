"""Programs that use jmp_policy as its users do, run from a clone: `python -m examples.gpt`."""
