"""`explain`: what it takes, for both Flax APIs."""

import re
import subprocess
import sys

import jax
import pytest
from flax import linen as nn

import jmp_policy as jmp


@pytest.mark.parametrize("target", [3, lambda x: x, nn.Dense], ids=["number", "function", "class"])
def test_what_is_no_module_is_refused(target):
    message = (
        f"explain takes a Flax module, got {target!r}. "
        "For example: explain(Net(), jax.ShapeDtypeStruct((8, 28, 28), 'float32'))."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        jmp.explain(target, jax.ShapeDtypeStruct((2, 4), "float32"))


@pytest.mark.slow
def test_explain_is_there_before_rich_is_loaded():
    heavy = "{'rich', 'jmp_policy.explanation'}"
    code = f"import sys, jmp_policy as jmp; print(jmp.explain.__name__, {heavy} & {{*sys.modules}})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert out.split() == ["explain", "set()"]
