"""The registry of policies: a law that takes `any_policy` holds for each of them."""

import gc
import importlib.metadata
import os
import tempfile
from collections.abc import Iterator

import hypothesis
import jax
import pytest

import jmp_policy as jmp

POLICIES = [
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "float8_e4m3fn",
    "mixed_float16",
    "mixed_bfloat16",
    "params=float32,compute=bfloat16,output=float32",
    "params=bfloat16,compute=float32,output=bfloat16",
    "params=none,compute=float16,output=none",
    "params=float32,compute=float16,output=float32,precision=highest",
    "params=float32,compute=float32,output=float32,precision=TF32_TF32_F32",
    "params=float32,compute=bfloat16,output=bfloat16,reduce=float32",
    "params=none,compute=none,output=none,reduce=bfloat16,precision=highest",
    "params=float32,compute=bfloat16,output=float32,accumulate=float32",
    "params=none,compute=none,output=none,accumulate=float32,reduce=float32,precision=highest",
    "infer",
    "infer_float32_vars",
    "int8_from_mixed_bfloat16",
    "int4/64_from_bfloat16",
    "int4/128(activations=true)_from_mixed_bfloat16",
    "int8(activations=false,min_size=0)_from_infer",
    "int4/32(min_size=7)_from_params=float32,compute=float16,output=none,precision=highest",
    "int8_from_params=float32,compute=bfloat16,output=bfloat16,reduce=float32",
    "int8_from_params=float32,compute=bfloat16,output=bfloat16,accumulate=float32",
    "e4m3/128(activations=true)_from_mixed_bfloat16",
    "nf4/64_from_mixed_bfloat16",
    "mxfp8_from_mixed_bfloat16",
    "mxfp8/64(gradients=e5m2,scale_rounding=floor)_from_mixed_float16",
    "mxfp4/16(activations=true,min_size=0)_from_bfloat16",
    "nvfp4(square_weights=false)_from_mixed_bfloat16",
]


PROGRAMS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,  # the other worker would compile small programs again
    "jax_persistent_cache_enable_xla_caches": "none",
}


QUICK = "not slow"
"""The marker expression of a plain `pytest`, in `pyproject.toml`."""

SLOW = "slow"
"""The marker expression of the other tests. Property tests explore there."""

UNOPTIMIZED = "--xla_backend_optimization_level=0"
"""Most programs run once, on a few numbers: to optimize their machine code takes longer than all else about them."""

DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
"""The same program returns the same bits on a GPU each time, and no kernel is chosen by its speed."""


def pytest_configure(config: pytest.Config) -> None:
    """Lets what one test compiles serve the session: its other tests, the other workers, and child processes."""
    if _may_find_gpu():
        _add_flags(DETERMINISTIC)
    elif config.getoption("markexpr") == QUICK:
        _add_flags(UNOPTIMIZED)
    elif config.getoption("markexpr") == SLOW:
        hypothesis.settings.load_profile("explore")
    jax.config.update("jax_num_cpu_devices", 8)  # for programs on a mesh
    gc.set_threshold(50_000, 20, 50)  # the default looks through all that was traced and compiled, again and again
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:  # in a worker, from the process that started it
        return
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    for name, value in {"jax_compilation_cache_dir": folder.name, **PROGRAMS}.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiles without optimizations, unless a test trains for long or measures what they do."""
    jax.config.update("jax_disable_most_optimizations", item.get_closest_marker("optimized") is None)


def _add_flags(flags: str) -> None:
    """Adds XLA flags to the environment, unless they are set there."""
    given = os.environ.get("XLA_FLAGS", "")
    added = [flag for flag in flags.split() if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *added])


def _may_find_gpu() -> bool:
    """Whether JAX may compute on a GPU: to ask it would be to read the flags before they are set."""
    plugins = [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
    return jax.config.jax_platforms != "cpu" and any("cuda" in name or "rocm" in name for name in plugins)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds property tests to the slow ones; skips what is true of CPUs alone where JAX computes on something else."""
    platform = jax.default_backend()
    for item in items:
        if config.getoption("markexpr") == SLOW and item.get_closest_marker("hypothesis"):
            item.add_marker(pytest.mark.slow)
        if platform != "cpu" and (mark := item.get_closest_marker("cpu")):
            item.add_marker(pytest.mark.skip(reason=f"on CPUs alone, and this is a {platform}: {mark.args[0]}"))


def pytest_collection_finish() -> None:
    """Leaves modules, tests and their parameters, which stay to the end, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_default_precision() -> Iterator[None]:
    """Takes back what the root's `pytest_sessionstart` asks for on GPUs, for tests that look at precisions."""
    with jax.default_matmul_precision(None):
        yield


@pytest.fixture(params=POLICIES)
def any_policy(request: pytest.FixtureRequest) -> jmp.Policy:
    return jmp.get_policy(request.param)
