"""The module of a user, in the folder where the command line is used."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the module `NAME`, of the text `MODULE` of the test's file, which is the current one."""
    (tmp_path / f"{request.module.NAME}.py").write_text(request.module.MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == tmp_path:
            del sys.modules[name]
