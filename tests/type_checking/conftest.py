"""The files that pyright reads are no tests, and one of them is full of mistakes."""

collect_ignore = ["user_code.py", "user_mistakes.py"]
