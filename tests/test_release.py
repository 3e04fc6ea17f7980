"""What stands beside the package for a release: workflows, templates, the citation, the changelog, the recipe."""

import datetime
import importlib.util
import pathlib
import re
import tomllib

import pytest
import yaml

import jmp_policy as jmp

ROOT = pathlib.Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, PYTEST = PYPROJECT["project"], PYPROJECT["tool"]["pytest"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def read_yaml(path: pathlib.Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def read_jobs(workflow: pathlib.Path) -> list[dict]:
    return list(read_yaml(workflow)["jobs"].values())


def read_steps(workflow: pathlib.Path) -> list[dict]:
    return [step for job in read_jobs(workflow) for step in job.get("steps", [])]


def read_commands(workflow: pathlib.Path) -> list[str]:
    return [line.strip() for step in read_steps(workflow) for line in step.get("run", "").splitlines()]


def list_pythons() -> list[str]:
    return [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+", name)]


def read_lower_bounds() -> dict[str, str]:
    return dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", dependency).groups() for dependency in PROJECT["dependencies"])


def test_the_version_is_one():
    citation, recipe = read_yaml(ROOT / "CITATION.cff"), read_yaml(ROOT / "recipe" / "recipe.yaml")
    assert {jmp.__version__, citation["version"], recipe["context"]["version"]} == {PROJECT["version"]}


def test_the_changelog_has_the_version_with_the_date_of_the_citation():
    unreleased, newest, *older = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert unreleased == "Unreleased"
    assert newest == f"{PROJECT['version']} - {read_yaml(ROOT / 'CITATION.cff')['date-released']}"
    dates = [datetime.date.fromisoformat(heading.partition(" - ")[2]) for heading in [newest, *older]]
    assert dates == sorted(dates, reverse=True)


def test_the_changelog_says_nothing_twice_and_fits_the_page():
    entries = [" ".join(entry.split()) for entry in re.findall(r"^- (?:.+\n)+?(?=- |\n|\Z)", CHANGELOG, re.MULTILINE)]
    assert len(entries) > 20
    assert len(set(entries)) == len(entries)
    assert [line for line in CHANGELOG.splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_unless_a_job_says_more(workflow):
    assert read_yaml(workflow)["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_the_actions_of_a_workflow_are_pinned(workflow):
    text = workflow.read_text(encoding="utf-8")
    uses = re.findall(r"uses: (.*)", text)
    assert len(uses) == len([user for user in [*read_jobs(workflow), *read_steps(workflow)] if "uses" in user]) > 0
    ours = {f"./{path.relative_to(ROOT).as_posix()}" for path in WORKFLOWS}
    pinned = r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+"
    assert [use for use in uses if use not in ours and not re.fullmatch(pinned, use)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_extras_modules_and_files_that_exist(workflow):
    commands = "\n".join(read_commands(workflow))
    extras = {extra for given in re.findall(r"'\.\[([\w,]+)\]'", commands) for extra in given.split(",")}
    assert extras <= set(PROJECT["optional-dependencies"])
    files = re.findall(r"@?((?:tests|\.ci)/[\w./]*)", commands)
    assert [file for file in files if not (ROOT / file).exists()] == []
    modules = set(re.findall(r"python -m (\w+)", commands)) - {"pip", "venv", "build"}
    assert [module for module in modules if not (ROOT / module / "__main__.py").exists()] == []


def test_the_tests_run_on_every_python_that_the_package_names():
    matrix = read_yaml(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["quick"]["strategy"]["matrix"]
    assert matrix["python"] == list_pythons()
    assert [name.partition("-")[0] for name in matrix["os"]] == ["ubuntu", "macos", "windows"]


def test_every_run_selects_by_the_same_markers():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    options = PYTEST["ini_options"]
    default = re.search(r"-m '([^']*)'", options["addopts"])[1]
    assert default.startswith("not slow")
    known = {re.match(r"\w+", marker)[0] for marker in options["markers"]} | {"hypothesis", "or", "and", "not"}
    used = re.findall(r"\w+", " ".join(re.findall(r'-m "([^"]*)"', ci + workflow)))
    assert set(used) - known == set()


def test_ci_runs_the_test_command_of_the_readme():
    command = r"^python3 -m venv \.venv && \.venv/bin/pip install -e '\.\[test\]' && \.venv/bin/pytest$"
    assert len(re.findall(command, (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)) == 1
    assert r"grep '\.venv/bin/pytest$' README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_only_the_job_that_publishes_may_ask_for_an_identity():
    jobs = read_yaml(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert {name: job.get("permissions", {}) for name, job in jobs.items()} == {
        "tests": {},
        "build": {},
        "publish": {"id-token": "write"},
    }


def test_nothing_is_published_that_was_not_tested():
    jobs = read_yaml(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["publish"]["needs"] == ["build", "tests"]
    assert jobs["tests"] == {"uses": "./.github/workflows/tests.yml"}
    # YAML 1.1 reads the key `on` as true.
    assert "workflow_call" in read_yaml(ROOT / ".github" / "workflows" / "tests.yml")[True]


def test_the_oldest_versions_that_are_tested_are_the_lower_bounds():
    lines = (ROOT / ".ci" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    assert dict(line.split("==") for line in lines) == read_lower_bounds()


def test_the_pages_say_the_lower_bounds():
    bounds = read_lower_bounds()
    install = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    said = f"asks for jax {bounds['jax']}, flax {bounds['flax']} and optax {bounds['optax']} or newer"
    assert said in " ".join(install.split())
    row = rf"\| 3\.11 \| {bounds['jax']} \| {bounds['flax']} \| {bounds['optax']} \| {bounds['ml_dtypes']}\.0 \|"
    assert re.search(row, install)


def test_the_table_of_versions_has_every_python_and_stands_once():
    install = (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| (3\.\d+) \|", install, re.MULTILINE)) == set(list_pythons())
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "(docs/start/install.md#versions)" in contributing
    assert "| Python | jax |" not in contributing


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_has_a_label_for_each_field_and_names_that_exist(template):
    form = read_yaml(template)
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    identities = [field["id"] for field in fields]
    assert len(set(identities)) == len(identities)
    for name in re.findall(r"jmp\.([\w.]+\w)", template.read_text(encoding="utf-8")):
        found = jmp
        for part in name.split("."):
            found = getattr(found, part)


def test_bug_reports_ask_for_what_doctor_prints_and_what_explain_says():
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    assert "jmp-policy doctor --json" in text
    assert "jmp.explain(model, x)" in text


RECIPE = read_yaml(ROOT / "recipe" / "recipe.yaml")


def test_the_recipe_says_what_the_package_says():
    assert RECIPE["package"]["name"] == PROJECT["name"]
    assert f">={RECIPE['context']['python_min']}" == PROJECT["requires-python"]
    python, *needed = RECIPE["requirements"]["run"]
    assert python == "python >=${{ python_min }}"
    assert [name.replace(" ", "") for name in needed] == PROJECT["dependencies"]
    (command,) = PROJECT["scripts"]
    assert RECIPE["build"]["python"]["entry_points"] == [f"{command} = {PROJECT['scripts'][command]}"]
    assert RECIPE["about"]["license"] == PROJECT["license"]


def test_the_recipe_imports_every_public_package():
    imports = RECIPE["tests"][0]["python"]["imports"]
    packages = [*(name for name in jmp._LAZY if name != "compat"), "compat.keras", "compat.torch"]
    assert sorted(imports) == sorted(["jmp_policy", *(f"jmp_policy.{name}" for name in packages)])
    assert [name for name in imports if importlib.util.find_spec(name) is None] == []
