"""A limit of `docs/mesh.md` that ends a process, which the page itself only warns of."""

import subprocess
import sys

import pytest
from pages import FOLDER, read_blocks


@pytest.mark.slow
@pytest.mark.cpu("the compiler that dies is that of CPUs")
def test_a_half_sum_beside_an_axis_left_to_xla_still_kills_a_process_without_the_option():
    setup, *blocks = [block.code for block in read_blocks((FOLDER / "mesh.md").read_text(encoding="utf-8"))]
    (block,) = [block for block in blocks if "xla_disable_hlo_passes" in block]
    for program, dies in [(block, False), (block.replace("compiler_options=options", ""), True)]:
        command = [sys.executable, "-c", setup + program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ("Invalid binary instruction opcode copy" in done.stderr) == dies, done.stderr
        assert (done.returncode < 0) == dies
