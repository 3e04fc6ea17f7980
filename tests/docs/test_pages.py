"""Each page of the documentation is a program that runs, and prints the outputs on the page."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from pages import FOLDER, Block, assert_prints, read_blocks

PAGES = {str(page.relative_to(FOLDER).with_suffix("")): page for page in sorted(FOLDER.rglob("*.md"))}
BLOCKS = {name: blocks for name, page in PAGES.items() if (blocks := read_blocks(page.read_text(encoding="utf-8")))}
NOT_INSTALLABLE = ("transformer_engine",)
"""Blocks that need a GPU are parsed only."""

RUN = """
import contextlib, io, json, pathlib, sys
names = {"__name__": "__main__"}
printed = []
for place, code in json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")):
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(compile(code, place, "exec"), names)
    printed.append(stdout.getvalue())
pathlib.Path(sys.argv[2]).write_text(json.dumps(printed))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_the_programs_of_a_page_run_and_print_its_outputs(name, tmp_path):
    blocks = [block for block in BLOCKS[name] if not set(block.needs) & set(NOT_INSTALLABLE)]
    missing = {needed for block in blocks for needed in block.needs if not is_installed(needed)}
    blocks = [block for block in blocks if not missing & set(block.needs)]
    for block, printed in zip(blocks, run(PAGES[name], blocks, tmp_path), strict=True):
        if block.output is not None:
            assert_prints(f"{PAGES[name]}:{block.line}", printed, block.output)
    if missing:
        pytest.skip(f"some of its programs need {', '.join(sorted(missing))}")


@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_have_an_end_and_can_be_parsed(name):
    for block in BLOCKS.get(name, ()):
        compile(block.code, f"{PAGES[name]}:{block.line}", "exec")
    open_fence = ""
    for line in PAGES[name].read_text(encoding="utf-8").splitlines():
        if fence := re.match(r" *(```+)(\w*)", line):
            assert not (open_fence and fence[2]), f"{name}: {line!r} inside of a block"
            open_fence = "" if open_fence else fence[1]
    assert open_fence == ""


@pytest.mark.slow
@pytest.mark.cpu("the compiler that dies is that of CPUs")
def test_a_half_sum_beside_an_axis_left_to_xla_still_kills_a_process_without_the_option():
    """A limit of `docs/mesh.md` of which the page only warns."""
    setup, *blocks = [block.code for block in BLOCKS["mesh"]]
    (block,) = [block for block in blocks if "xla_disable_hlo_passes" in block]
    for program, dies in [(block, False), (block.replace("compiler_options=options", ""), True)]:
        done = subprocess.run([sys.executable, "-c", setup + program], capture_output=True, text=True, timeout=300)
        assert ("Invalid binary instruction opcode copy" in done.stderr) == dies, done.stderr
        assert (done.returncode < 0) == dies


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def run(page: pathlib.Path, blocks: list[Block], folder: pathlib.Path) -> list[str]:
    """Runs the blocks in a process and an empty folder, with warnings as errors, and returns the output of each."""
    program, printed, home = folder / "program.json", folder / "printed.json", folder / "home"
    home.mkdir()
    program.write_text(json.dumps([(f"{page}", "\n" * (block.line - 1) + block.code) for block in blocks]))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "MPLBACKEND": "agg", "COLUMNS": "80"}
    warnings = "ignore" if any(block.needs for block in blocks) else "error"
    command = [sys.executable, "-W", warnings, "-c", RUN, str(program), str(printed)]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{page}:\n{done.stderr[-4000:]}"
    return json.loads(printed.read_text(encoding="utf-8"))
