"""Measures the CPU time of tests. With `--budget` the run fails if one default test takes too large a part of it.

CPU time includes collection, all workers and the child processes of tests, which are counted when they end. Seconds are
no limit: the same tests took 320 and 830 CPU seconds on one machine, by what else its host computed.
"""

import os
from collections.abc import Iterator

import pytest

EACH = 1 / 60
"""The part of the CPU time of all tests that one default test may take, unless `EXPENSIVE` has it: five seconds where
they take five minutes. Most take a tenth of that; the first test of a worker compiles for the others."""

EXPENSIVE = {
    "jmp_policy/nnx/_layer_table.py": "its example trains in NVFP4",
    "jmp_policy/quant/_array.py": "its example stores a weight in each block format",
    "jmp_policy/policy/_block_formats.py": "its example trains in float8",
    "jmp_policy/numerics/_tune.py": "its example runs a whole search",
    "jmp_policy/contrib/_tune_bits.py": "an example runs a whole search",
    "tests/contrib/tune_bits/": "a trial compiles a model in several formats",
    "tests/contrib/layer_by_layer/": "the first test of a format compiles its rounding",
    "examples/gpt/": "an example trains a small GPT",
    "tests/cli/": "commands run whole programs",
    "tests/examples/": "a run trains",
    "jmp_policy/numerics/_predict.py": "its example measures a program and predicts it",
    "tests/checkpoints/test_moments_in_8_bits.py": "the first test compiles the rounding to 8 bits",
    "tests/linen/test_linen_float8_transforms.py": "the first test compiles a float8 layer and its gradient",
    "tests/linen/test_linen_nvfp4.py": "the first test compiles an NVFP4 layer and its gradient",
    "tests/nnx/test_nnx_nvfp4.py": "the first test compiles an NVFP4 layer and its gradient",
    "tests/linen/test_cache.py": "the first test compiles attention with a cache",
    "tests/nnx/test_nnx_grad.py": "the first test compiles a step with batch statistics",
    "tests/report/test_kernel.py": "starts a Jupyter kernel",
    "tests/test_import.py": "starts Python processes",
    "tests/test_pickles.py": "starts Python processes",
    "tests/quant/": "the first test of a format compiles its rounding",
    "tests/policy/test_grammar.py": "property tests draw many policies",
    "tests/optim/test_random_faults.py": "a run of faults takes many steps",
    "tests/numerics/nonfinite/": "the search for an origin is compiled with the program",
    "tests/numerics/predict/": "a program is measured and then runs under the prediction",
    "tests/numerics/tune/test_tune.py": "a trial compiles a program in two dtypes",
}
"""Files and folders whose tests may take longer, with the reason."""

SECONDS = pytest.StashKey[dict[str, float]]()
WORKERS = pytest.StashKey[list[float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--budget`."""
    parser.addoption("--budget", action="store_true", help="fail if a test exceeds its part of the CPU time")


def pytest_configure(config: pytest.Config) -> None:
    """Prepares the measurements."""
    config.stash[SECONDS] = {}
    config.stash[WORKERS] = []


def read_cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measures one test with its setup and teardown."""
    before = read_cpu_seconds()
    result = yield
    item.config.stash[SECONDS][item.nodeid] = read_cpu_seconds() - before
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands a worker's measurements to the controller; there, fails a run that exceeds the budget."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["cpu"] = [read_cpu_seconds(), session.config.stash[SECONDS]]
    elif session.config.getoption("budget") and session.exitstatus == 0 and find_excess_of_run(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Collects the measurements of a worker that has ended."""
    total, seconds = getattr(node, "workeroutput", {}).get("cpu", (0.0, {}))
    node.config.stash[WORKERS].append(total)
    node.config.stash[SECONDS].update(seconds)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Says what the tests took and, with `--budget`, what was too much."""
    if config.getoption("collectonly"):
        return
    spent = sum(config.stash[SECONDS].values())
    terminalreporter.write_line(f"CPU time: {measure_total(config):.0f} s, of which {spent:.0f} s inside tests")
    if path := os.environ.get("JMP_POLICY_TEST_SECONDS"):
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{seconds:.3f}\t{name}\n" for name, seconds in config.stash[SECONDS].items())
    if config.getoption("budget"):
        for line in find_excess_of_run(config):
            terminalreporter.write_line(line, red=True)


def measure_total(config: pytest.Config) -> float:
    """Returns the CPU seconds of the run so far: the workers', if there are any, and this process's."""
    workers = config.stash[WORKERS]
    return sum(workers) + os.times().user + os.times().system if workers else read_cpu_seconds()


def find_excess_of_run(config: pytest.Config) -> list[str]:
    """Returns a line for each test of this run that exceeds the limit."""
    return find_excess(config.stash[SECONDS])


def find_excess(each: dict[str, float]) -> list[str]:
    """Returns a line for each test that takes too large a part of these CPU seconds by test."""
    limit = EACH * sum(each.values())
    return [
        f"Over the budget: {name} took {seconds:.1f} of {sum(each.values()):.0f} CPU seconds, limit {limit:.1f}. "
        "Make it cheaper, mark it `slow`, or give a reason in `EXPENSIVE` of tests/budget.py."
        for name, seconds in sorted(each.items())
        if seconds > limit and not name.startswith(tuple(EXPENSIVE))
    ]
