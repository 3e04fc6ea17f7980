"""Runs one benchmark in a process of its own, and writes its measurements to a file after each table.

`python -m benchmarks._run NAME PATH [--quick]`, which `python -m benchmarks` does for each.
"""

import argparse
import importlib
import json
import os
import pathlib
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from benchmarks._results import hash_sources, list_versions
from benchmarks._suites import SUITES

LIBRARIES = (
    "jax", "jaxlib", "flax", "optax", "ml_dtypes", "jmp", "mixed-precision-for-JAX", "qwix", "keras", "dm-haiku",
    "torch", "transformers", "orbax-checkpoint", "libtpu",
)  # fmt: skip
"""Those whose versions decide what is measured, where they are installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SUITES)
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(argv)
    measured: dict[str, Any] = {**describe_machine(), "tables": []}
    try:
        measure(options.name, options.quick, measured, options.path)
    except ModuleNotFoundError as error:
        traceback.print_exc()
        measured |= _explain_missing(error)
    except Exception as error:
        traceback.print_exc()
        measured["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    measured["process_seconds"] = round(sum(os.times()[:4]), 1)  # children included
    options.path.write_text(json.dumps(measured), encoding="utf-8")
    return 1 if "error" in measured else 0


def _explain_missing(error: ModuleNotFoundError) -> dict[str, str]:
    """A library that is not installed is missing; a module of ours that is not there is an error."""
    is_ours = (error.name or "").partition(".")[0] in ("benchmarks", "jmp_policy")
    if is_ours:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"missing": error.name or str(error)}


def measure(name: str, quick: bool, measured: dict[str, Any], path: pathlib.Path) -> None:
    """Adds the tables of a benchmark to the measurements; each is saved at once."""
    import jax

    with jax.numpy_dtype_promotion("standard"):  # Flax's norms, and others' libraries, promote by themselves
        for made in importlib.import_module(f"benchmarks.{name}").tables(quick):
            measured["tables"].append(made.to_dict())
            path.write_text(json.dumps(measured), encoding="utf-8")


def describe_machine() -> dict[str, Any]:
    """When and on what this is: date, versions, sources and device."""
    import jax

    import jmp_policy

    device = jax.devices()[0]
    own = {"python": platform.python_version(), "jmp-policy": jmp_policy.__version__}
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {**own, **list_versions(LIBRARIES)},
        "sources": hash_sources(),
        "device": {"platform": device.platform, "kind": device.device_kind, "cores": os.cpu_count()},
    }


if __name__ == "__main__":
    sys.exit(main())
