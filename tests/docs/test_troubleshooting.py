"""Each entry of the page of troubles shows its symptom, and shows that the remedy takes it away."""

import re

import pytest
from pages import FOLDER, read_blocks

TEXT = (FOLDER / "troubleshooting.md").read_text(encoding="utf-8")
HEAD, *ENTRIES = re.split(r"^## ", TEXT, flags=re.MULTILINE)
BY_TITLE = {entry.partition("\n")[0]: entry for entry in ENTRIES}
ASKED_FOR = [
    "The loss is nan",
    "The loss scale sits at its floor",
    "Many steps are skipped",
    "Half precision is not faster",
    "Accuracy differs from float32",
    "int8 is worse than expected",
    "Results changed after an upgrade",
    "A sharded run differs",
    "Out of memory",
    "Every step compiles again",
    "Gradients are zero",
    "Parameters do not move",
    "A checkpoint will not restore under another policy",
    "Evaluation differs from training",
]


@pytest.mark.parametrize("entry", BY_TITLE.values(), ids=BY_TITLE)
def test_an_entry_asserts_its_symptom_before_the_tool_and_the_fix_after_it(entry):
    blocks = read_blocks(entry)
    shows = [bool(re.search(r"^ *assert .*# the symptom$", block.code, re.MULTILINE)) for block in blocks]
    mends = [bool(re.search(r"^ *assert .*# the fix$", block.code, re.MULTILINE)) for block in blocks]
    finds = [block.output is not None for block in blocks]
    assert shows.index(True) < finds.index(True) < mends.index(True)
    assert not any(map(all, zip(shows, mends, strict=True)))


@pytest.mark.parametrize("entry", BY_TITLE.values(), ids=BY_TITLE)
def test_an_entry_has_a_symptom_a_diagnosis_and_a_fix(entry):
    words = re.findall(r"^\*\*(.+?)\*\*", entry, re.MULTILINE)
    assert words == ["Symptom.", "Diagnosis.", "Fix."]


@pytest.mark.parametrize("entry", BY_TITLE.values(), ids=BY_TITLE)
def test_the_tool_of_an_entry_prints_what_is_checked(entry):
    outputs = [block.output for block in read_blocks(entry) if block.output is not None]
    assert outputs
    assert all(re.search(r"\w{3}", output) for output in outputs)  # `...` alone would check nothing


def test_each_symptom_has_an_entry_and_a_line_in_the_table():
    linked = re.findall(r"\| \[(.+)\]\(#(.+)\) \|", HEAD)
    assert [title for title, _ in linked] == list(BY_TITLE)
    assert set(ASKED_FOR) <= set(BY_TITLE)
    for title, anchor in linked:
        assert anchor == re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))
