"""The tests on a GPU: what is true of CPUs alone is skipped, and float32 is multiplied as float32."""

import importlib.metadata
import types

import jax
import pytest
from meshes import find_devices, make_mesh


@pytest.fixture
def hooks(request):
    """The `conftest.py` of all tests."""
    return next(plugin for plugin in request.config.pluginmanager.get_plugins() if hasattr(plugin, "POLICIES"))


@pytest.fixture
def start_session(request):
    """What the root's `conftest.py` does before any test."""
    plugins = request.config.pluginmanager.get_plugins()
    return next(plugin.pytest_sessionstart for plugin in plugins if hasattr(plugin, "_paste_examples"))


def _item(*marks):
    marks, added = {mark.name: mark for mark in marks}, []
    return types.SimpleNamespace(get_closest_marker=marks.get, add_marker=added.append, added=added)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_true_of_cpus_alone_is_skipped_elsewhere(hooks, monkeypatch, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    marked, plain = _item(pytest.mark.cpu("it flushes subnormals").mark), _item(pytest.mark.slow.mark)
    hooks.pytest_collection_modifyitems([marked, plain])
    reasons = [mark.kwargs["reason"] for mark in marked.added]
    assert reasons == ([] if platform == "cpu" else ["on CPUs alone, and this is a gpu: it flushes subnormals"])
    assert plain.added == []


def test_float32_is_multiplied_as_float32_on_a_gpu(start_session, monkeypatch):
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "")
    before = jax.config.jax_default_matmul_precision
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    try:
        start_session()
        assert jax.config.jax_default_matmul_precision == "highest"
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def test_a_test_of_precisions_sees_none_by_default(no_default_precision):
    assert jax.config.jax_default_matmul_precision is None


@pytest.mark.parametrize(
    ("installed", "chosen", "may"),
    [
        (["cuda12"], None, True),
        (["cuda12"], "cpu", False),
        (["rocm7"], "", True),
        ([], None, False),
        (["other"], None, False),
    ],
)
def test_a_gpu_is_expected_where_its_plugin_is_installed(hooks, monkeypatch, installed, chosen, may):
    plugins = [types.SimpleNamespace(name=name) for name in installed]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(hooks, "jax", types.SimpleNamespace(config=types.SimpleNamespace(jax_platforms=chosen)))
    assert hooks._may_find_gpu() == may


def test_meshes_are_of_cpus_where_there_are_too_few_devices(monkeypatch):
    cpus, gpu = jax.devices("cpu"), object()
    monkeypatch.setattr(jax, "devices", lambda platform=None: cpus if platform == "cpu" else [gpu])
    assert find_devices(1) == [gpu]
    assert find_devices(4) == cpus[:4]
    assert make_mesh((2, 2), ("x", "y")).shape == {"x": 2, "y": 2}
