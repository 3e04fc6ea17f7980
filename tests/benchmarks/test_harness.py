"""`python -m benchmarks`: what runs, what is kept of it, and the page that is made of what is kept."""

import importlib
import json
import re
import sys
import types

import pytest

import jmp_policy
from benchmarks import __main__ as command, _harness, _report, _run
from benchmarks._results import ResultTable, hash_sources
from benchmarks._suites import SUITES


def _measured(cell="1.00", seconds="0.1", *, quick=False, date="2026-01-01", **more):
    made = ResultTable("steps", "Steps", ("of", "bytes", "time"), (("ours", cell, seconds),), ("time",), ("A note.",))
    device = {"platform": "cpu", "kind": "cpu", "cores": 2}
    return {"date": date, "versions": {"jax": "1.2"}, "device": device, "tables": [made.to_dict()], "seconds": 3.0,
            "quick": quick, **more}  # fmt: skip


def _results(**suites):
    return {"layout": _harness.LAYOUT, "suites": suites}


def test_a_later_run_leaves_other_suites_their_dates():
    old = _results(optimizer=_measured(), faults=_measured())
    merged = _harness.merge_results(old, {"faults": _measured(date="2026-02-02")}, list(SUITES))
    assert {name: kept["date"] for name, kept in merged["suites"].items()} == {
        "optimizer": "2026-01-01", "faults": "2026-02-02"
    }  # fmt: skip


def test_a_quick_run_that_would_replace_results_at_real_sizes_is_refused_before_it_begins(
    monkeypatch, tmp_path, capsys
):
    path = tmp_path / "results" / "cpu.json"
    _harness.write_results(path, _results(faults=_measured(), optimizer=_measured(quick=True)))
    ran = []
    monkeypatch.setattr(_harness, "run_suites", lambda names, quick, jobs: ran.extend(names) or ())
    arguments = ["--quick", "--out", str(tmp_path), "--only"]
    assert command.main([*arguments, "optimizer", "faults"]) == 2
    assert f"{path} has faults at real sizes. Name another folder: --out DIR." in capsys.readouterr().err
    assert not ran
    assert command.main([*arguments, "optimizer"]) == 0
    assert ran == ["optimizer"]


def test_a_library_that_is_missing_here_loses_no_result_from_elsewhere():
    missing = _measured(missing="qwix") | {"tables": []}
    old = _results(quant=_measured())
    assert _harness.merge_results(old, {"quant": missing}, list(SUITES)) == old
    assert _harness.merge_results(_results(), {"quant": missing}, list(SUITES))["suites"]["quant"] == missing


def test_a_file_of_another_layout_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"layout": 0}', encoding="utf-8")
    with pytest.raises(_harness.HarnessError, match="is not a file of results"):
        _harness.read_results(tmp_path / "a.json")


def _run_suite(monkeypatch, path, tables):
    monkeypatch.setitem(sys.modules, "benchmarks.faults", types.SimpleNamespace(tables=tables))
    status = _run.main(["faults", str(path), "--quick"])
    return status, json.loads(path.read_text(encoding="utf-8"))


def test_a_benchmark_that_fails_says_how_and_keeps_what_it_had(monkeypatch, tmp_path):
    def break_down(quick):
        yield ResultTable("first", "First", ("a",), (("1",),))
        raise ValueError("no more")

    status, measured = _run_suite(monkeypatch, tmp_path / "a.json", break_down)
    assert (status, measured["error"]) == (1, "ValueError: no more")
    assert [made["name"] for made in measured["tables"]] == ["first"]
    assert measured["versions"]["jax"]
    assert measured["versions"]["jmp-policy"] == jmp_policy.__version__
    assert measured["sources"] == hash_sources()


def _import_in_a_suite(monkeypatch, path, statement):
    def import_it(quick):
        exec(statement)
        yield

    return _run_suite(monkeypatch, path, import_it)


def test_a_benchmark_whose_library_is_missing_is_no_failure(monkeypatch, tmp_path):
    status, measured = _import_in_a_suite(monkeypatch, tmp_path / "a.json", "import there_is_no_such.library")
    assert (status, measured["missing"]) == (0, "there_is_no_such")
    assert _harness.describe_outcome(measured) == "not measured: needs there_is_no_such"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import benchmarks._mesure", "ModuleNotFoundError: No module named 'benchmarks._mesure'"),
        ("import jmp_policy.optimm", "ModuleNotFoundError: No module named 'jmp_policy.optimm'"),
        ("from json import lods", "ImportError: cannot import name 'lods' from 'json'"),
    ],
)
def test_an_import_that_is_misspelled_is_a_failure(monkeypatch, tmp_path, statement, said):
    status, measured = _import_in_a_suite(monkeypatch, tmp_path / "a.json", statement)
    assert (status, measured.get("missing")) == (1, None)
    assert measured["error"].startswith(said)


def test_the_page_is_made_of_the_files_alone(tmp_path):
    _harness.write_results(tmp_path / "results" / "cpu.json", _results(faults=_measured(error="KeyError: 1")))
    page = _report.make_report(tmp_path)
    assert "**Machine 1** is cpu, 2 cores, with jax 1.2." in page
    assert "Failed: KeyError: 1. Measured on 2026-01-01 on machine 1, in 3 s" in page
    assert "**Steps**\n\n| of | bytes | time |\n|---|---|---|\n| ours | 1.00 | 0.1 |\n\n- A note." in page
    assert "Differs from run to run: time." in page
    assert page.count("\nNot measured") == len(SUITES) - 1 + len(_report.COMPILED) + 1


def test_the_page_has_what_the_compiler_said(tmp_path):
    origin = {"target": "TPU v5e", "jax": "1.2", "sources": "0"}
    kept = {"date": "2026-03-03", "origin": origin, "tables": _measured()["tables"], "programs": {}}
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "compiled-tpu.json").write_text(json.dumps({"runs": [kept]}), encoding="utf-8")
    page = _report.make_report(tmp_path)
    assert "Compiled on 2026-03-03 for TPU v5e, with jax 1.2.\n\n**Steps**\n\n| of | bytes | time |" in page


def test_the_page_in_the_repository_is_that_of_its_files():
    """Whoever edits it by hand, or adds results without it, runs `python -m benchmarks report`."""
    assert (_harness.FOLDER / "RESULTS.md").read_text(encoding="utf-8") == _report.make_report(_harness.FOLDER)


def test_the_page_in_the_repository_has_its_plots():
    linked = set(re.findall(r"\]\(plots/([^)]*)\)", (_harness.FOLDER / "RESULTS.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in (_harness.FOLDER / "plots").iterdir()}
    assert "loss_scaling.png" in linked


def test_no_result_in_the_repository_is_of_a_quick_run_or_a_failure():
    kept = _harness.read_results(_harness.FOLDER / "results" / "cpu.json")["suites"]
    assert [name for name, measured in kept.items() if measured["quick"] or "error" in measured] == []


def test_every_suite_has_tables():
    for name in SUITES:
        assert importlib.import_module(f"benchmarks.{name}").tables, name
