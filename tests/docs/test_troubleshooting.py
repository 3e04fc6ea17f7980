"""Each entry of the troubleshooting page asserts its symptom, and asserts that the fix removes it."""

import re

import pytest
from pages import FOLDER, read_blocks

HEAD, *ENTRIES = re.split(r"^## ", (FOLDER / "troubleshooting.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
BY_TITLE = {entry.partition("\n")[0]: entry for entry in ENTRIES}
ASKED_FOR = {
    "The loss is nan", "The loss scale sits at its floor", "Many steps are skipped", "Half precision is not faster",
    "Accuracy differs from float32", "A quantized model", "Recorded values", "Several devices", "Out of memory",
    "Every step compiles again", "Gradients are zero", "Lost updates", "Checkpoints",
    "The loss jumps", "Evaluation differs from training",
}  # fmt: skip


@pytest.mark.parametrize("entry", BY_TITLE.values(), ids=BY_TITLE)
def test_an_entry_asserts_its_symptom_before_the_diagnosis_and_the_fix_after_it(entry):
    assert re.findall(r"^\*\*(.+?)\*\*", entry, re.MULTILINE) == ["Symptom.", "Diagnosis.", "Fix."]
    blocks = read_blocks(entry)
    symptoms, fixes = (
        [bool(re.search(rf"^ *assert .*# {word}$", block.code, re.MULTILINE)) for block in blocks]
        for word in ("the symptom", "the fix")
    )
    prints = [block.output is not None for block in blocks]
    assert symptoms.index(True) < prints.index(True) < fixes.index(True)
    assert not any(map(all, zip(symptoms, fixes, strict=True)))
    assert all(re.search(r"\w{3}", block.output) for block in blocks if block.output)  # `...` alone would check nothing


def test_each_symptom_has_a_line_in_the_table_with_an_entry_or_a_guide():
    linked = dict(re.findall(r"\| \[(.+)\]\((.+)\) \|", HEAD))
    entries = {title: target[1:] for title, target in linked.items() if target.startswith("#")}
    assert list(entries) == list(BY_TITLE)
    assert set(linked) >= ASKED_FOR
    assert all(anchor == re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title, anchor in entries.items())
