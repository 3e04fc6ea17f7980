"""Models as texts, of which tests change one line."""

import functools
import importlib
import itertools
import sys
import tempfile
from pathlib import Path

import jax

import jmp_policy as jmp

HERE, GPT = Path(__file__).parent, Path(jmp.__file__).parent.parent / "examples/gpt"
FOLDER = Path(tempfile.mkdtemp())
sys.path.insert(0, str(FOLDER))
_numbers = itertools.count()


@functools.cache
def lock_model(model, *changes, platform=None):
    """Locks the step of a model in whose text each `(old, new)` is replaced. `old` stands there exactly once."""
    namespace = load(model, changes)
    return jmp.numerics.lock(namespace["step"], platform=platform)(*namespace["args"], **namespace["kwargs"])


def load(model, changes):
    name = f"planted_{next(_numbers)}"
    if model.startswith("gpt"):
        return _load_gpt(name, model.partition("_")[2], changes)
    path = FOLDER / f"{name}.py"
    path.write_text(replace({path: (HERE / "models" / f"{model}.txt").read_text()}, changes)[path])
    importlib.invalidate_caches()
    return vars(importlib.import_module(name))


SETTINGS = """
from .model import *
policy = jmp.PolicyMap({"norm": "float32"}, default="mixed_bfloat16")
config = TrainerConfig(policy, GPTConfig(width=16, depth=2, heads=2, context=16))
"""


def _load_gpt(name, api, changes):
    folder = FOLDER / name
    folder.mkdir()
    names = ("__init__.py", "devices.py", "model.py", f"gpt_{api}.py")
    texts = {folder / each: (GPT / each).read_text() for each in names} | {folder / "settings.py": SETTINGS}
    for path, text in replace(texts, changes).items():
        path.write_text(text)
    importlib.invalidate_caches()
    settings = importlib.import_module(f"{name}.settings")
    trainer = settings.make_trainer(api, settings.config)
    state = (trainer.state,) if api == "linen" else (trainer.model, trainer.optimizer)
    windows = jax.ShapeDtypeStruct((2, 17), "uint8")
    return {"step": trainer._train_step, "args": (*state, windows), "kwargs": {}}


def replace(texts, changes):
    for old, new in changes:
        found = [path for path, text in texts.items() if old in text]
        assert len(found) == 1, f"{old!r} is in {found}"
        assert texts[found[0]].count(old) == 1, old
        texts[found[0]] = texts[found[0]].replace(old, new)
    return texts
