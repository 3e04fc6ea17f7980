"""Training so small that it takes seconds, compilation included."""

import io
import random
from pathlib import Path

from rich.console import Console

from jmp_policy.demo import GPTConfig, TrainOptions

MODEL = GPTConfig(width=16, depth=1, heads=2, context=16)


def write_text(path: Path) -> Path:
    """Random words, which a bigram model cannot spell."""
    words = ["policy", "compute", "parameter", "float", "scale", "gradient", "underflow", "half"]
    path.write_text(" ".join(random.Random(0).choices(words, k=5000)))
    return path


def options(folder: Path, **wishes) -> TrainOptions:
    """Options of a tiny run on the text in `folder`."""
    defaults = {"policy": "float32", "data": (str(folder / "text.txt"),), "steps": 6, "out": folder / "run"}
    return TrainOptions(model=MODEL, batch_size=2, **defaults | wishes)


def silent_console() -> Console:
    return Console(file=io.StringIO(), markup=False, highlight=False, soft_wrap=True)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
