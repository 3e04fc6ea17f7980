"""Each page of the documentation is a program that runs, and prints what the page says."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from pages import FOLDER, Block, assert_prints, read_blocks, read_pages

PAGES = read_pages()
NOT_INSTALLABLE = ("transformer_engine",)
"""What no CPU can run: blocks that need it are parsed alone."""

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
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(FOLDER).with_suffix("")))
def test_the_programs_of_a_page_run_and_print_what_it_says(page, tmp_path):
    blocks = [
        block for block in read_blocks(page.read_text(encoding="utf-8")) if not set(block.needs) & set(NOT_INSTALLABLE)
    ]
    missing = {name for block in blocks for name in block.needs if importlib.util.find_spec(name) is None}
    blocks = [block for block in blocks if not missing & set(block.needs)]
    for block, printed in zip(blocks, run(page, blocks, tmp_path), strict=True):
        if block.output is not None:
            assert_prints(f"{page}:{block.line}", printed, block.output)
    if missing:
        pytest.skip(f"some of its programs need {', '.join(sorted(missing))}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(FOLDER).with_suffix("")))
def test_the_programs_of_a_page_can_be_parsed(page):
    for block in read_blocks(page.read_text(encoding="utf-8")):
        compile(block.code, f"{page}:{block.line}", "exec")


@pytest.mark.parametrize("page", sorted(FOLDER.rglob("*.md")), ids=lambda page: str(page.relative_to(FOLDER)))
def test_each_block_of_a_page_has_an_end(page):
    open_fence = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if fence := re.match(r" *(```+)(\w*)", line):
            assert not (open_fence and fence[2]), f"{page}: {line!r} inside of a block"
            open_fence = "" if open_fence else fence[1]
    assert open_fence == ""


def run(page: pathlib.Path, blocks: list[Block], folder: pathlib.Path) -> list[str]:
    """Runs the blocks in a process and a folder of their own, with warnings as errors, and returns what each prints."""
    program, printed = folder / "program.json", folder / "printed.json"
    home = folder / "home"
    home.mkdir()
    padded = [(f"{page}", "\n" * (block.line - 1) + block.code) for block in blocks]
    program.write_text(json.dumps(padded))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "MPLBACKEND": "agg", "COLUMNS": "80"}
    warnings = ["-W", "error"] if not any(block.needs for block in blocks) else ["-W", "ignore"]
    command = [sys.executable, *warnings, "-c", RUN, str(program), str(printed)]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{page}:\n{done.stderr[-4000:]}"
    return json.loads(printed.read_text(encoding="utf-8"))
