"""What a measurement was made on: the device, the computer around it, and the versions of the software."""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ... import __version__

PACKAGES = ("jax", "jaxlib", "flax", "optax")

# Instructions that compute in a half format, by the names that Linux has for them in /proc/cpuinfo, on x86 and on ARM.
# Those that only convert (f16c) are not among them.
HALF_INSTRUCTIONS = {
    "bfloat16": ("avx512_bf16", "amx_bf16", "bf16", "svebf16"),
    "float16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device, and what drives it.

    Attributes:
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      device: the device in words.
      system: the operating system, the architecture and the number of cores.
      versions: the versions of Python and of the packages that decide, as from `list_versions`.
      half_instructions: on a CPU, the instructions that compute in each half format, as Linux lists them; `None` where
        the operating system does not say, and on other devices.

    >>> from jmp_policy.cli import doctor
    >>> machine = doctor.Machine("cpu", "AMD EPYC 7543", "Linux x86_64, 2 cores", {"jax": "0.12.0", "jaxlib": "0.12.0"})
    >>> print(machine)
    AMD EPYC 7543 (cpu), Linux x86_64, 2 cores; jax 0.12.0, jaxlib 0.12.0
    """

    platform: str
    device: str
    system: str
    versions: Mapping[str, str]
    half_instructions: Mapping[str, tuple[str, ...]] | None = None

    def __str__(self) -> str:
        device = self.device if self.device.startswith(self.platform) else f"{self.device} ({self.platform})"
        versions = ", ".join(f"{name} {self.versions[name]}" for name in ("jax", "jaxlib"))
        return f"{device}, {self.system}; {versions}"

    def to_dict(self) -> dict[str, Any]:
        """The machine as plain dictionaries, lists and strings, for JSON.

        Its keys: `versions`, by package; `device`, with its `platform`, `name`, `system` and `half_instructions`.
        """
        instructions = self.half_instructions
        device = {
            "platform": self.platform,
            "name": self.device,
            "system": self.system,
            "half_instructions": instructions and {dtype: list(names) for dtype, names in instructions.items()},
        }
        return {"versions": dict(self.versions), "device": device}


def find_machine() -> Machine:
    """Describes JAX's default device, and the computer that it stands in."""
    device = jax.devices()[0]
    cores = os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}, {cores} core{'s' if cores > 1 else ''}"
    if device.platform == "cpu":
        facts = _read_cpu_facts()
        name = facts.get("model name") or platform.processor() or device.device_kind
        return Machine("cpu", name, system, list_versions(), find_half_instructions(facts))
    count = jax.device_count()
    name = f"{count} x {device.device_kind}" if count > 1 else device.device_kind
    return Machine(device.platform, name, system, list_versions())


def list_versions() -> dict[str, str]:
    """The versions of jmp_policy, of Python, and of the packages that it stands on.

    >>> from jmp_policy.cli import doctor
    >>> list(doctor.list_versions())
    ['jmp_policy', 'python', 'jax', 'jaxlib', 'flax', 'optax']
    """
    return {
        "jmp_policy": __version__,
        "python": platform.python_version(),
        **{name: _find_version(name) for name in PACKAGES},
    }


def find_half_instructions(facts: Mapping[str, str]) -> dict[str, tuple[str, ...]] | None:
    """The instructions that compute in each half format, of a CPU; `None` if nothing lists its instructions.

    Args:
      facts: lines of `/proc/cpuinfo`, by their names.

    >>> find_half_instructions({"flags": "fpu avx2 f16c avx512_bf16"})
    {'bfloat16': ('avx512_bf16',), 'float16': ()}
    """
    listed = facts.get("flags", facts.get("Features"))  # x86, ARM
    if listed is None:
        return None
    has = listed.split()
    return {dtype: tuple(name for name in names if name in has) for dtype, names in HALF_INSTRUCTIONS.items()}


def _read_cpu_facts() -> dict[str, str]:
    """The first processor's lines of `/proc/cpuinfo`, by their names; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
