"""Accelerators that need not be there: whole programs, compiled for a TPU or an H100 on any machine.

The compilers are in wheels: `libtpu`, which is the extra `compiled`, and in `jax[cuda12]`, some 4 GB. Arguments
are shapes and dtypes on a described device: nothing is allocated, and nothing runs. Set JAX_PLATFORMS=cpu, or
`jax.config.update("jax_platforms", "cpu")` first: with these wheels JAX would look for the devices themselves.

    target = TARGETS["tpu"]()
    compiled = target.compile(Program(jax.jit(step, donate_argnums=0), (state, batch)))
    figures(compiled), products(compiled)  # of benchmarks/_compiled.py
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks._programs import Program

H100 = pathlib.Path(__file__).with_name("h100.txtpb")


@dataclasses.dataclass(frozen=True)
class Target:
    """A target to compile for.

    Attributes:
      name: for a reader.
      device: a described device, or one that is there.
      options: of the compiler.
    """

    name: str
    device: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def compile(self, program: Program) -> Any:
        """The program, lowered and compiled for the device."""
        return program.step.lower(*self.put(program.args)).compile(compiler_options=self.options)

    def put(self, tree: Any) -> Any:
        """The shapes and dtypes of the arrays of a tree, on the device."""
        sharding = SingleDeviceSharding(self.device)

        def describe(leaf: Any) -> jax.ShapeDtypeStruct:
            leaf = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(describe, tree)


@functools.cache
def tpu(topology: str = "v5e:1x1") -> Target:
    """A TPU. Raises ModuleNotFoundError where its compiler is not installed.

    Args:
      topology: generation and shape, such as "v5e:1x1", "v6e:1x1" or "v4:2x2x1"; the program is for the first device.
    """
    _require("libtpu", "libtpu, the compiler for TPUs", "pip install 'jmp-policy[compiled]'")
    # What libtpu otherwise asks of the metadata server of a TPU machine, or of a lock that one process may hold.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, chips_per_host_bounds=(1, 1, 1))
    return Target(f"TPU {topology.split(':')[0]}", described.devices[0])


@functools.cache
def gpu(config: pathlib.Path = H100) -> Target:
    """A GPU. Raises ModuleNotFoundError where its compiler is not installed.

    Args:
      config: the file that describes it, a GpuTargetConfigProto in text.
    """
    install = f"pip install 'jax[cuda12]=={jax.__version__}'"
    _require("jax_cuda12_plugin", "JAX's plugin for CUDA 12", install)
    _require("nvidia.cuda_nvcc", "NVIDIA's wheels, of which nvidia-cuda-nvcc-cu12 has the assembler", install)
    toolkit = importlib.util.find_spec("nvidia.cuda_nvcc")
    assert toolkit is not None
    assert toolkit.submodule_search_locations is not None
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=config.read_text(encoding="utf-8"), topology="1x1x1"
    )
    options = {"xla_gpu_cuda_data_dir": toolkit.submodule_search_locations[0]}
    return Target(config.stem.upper(), described.devices[0], options)


@functools.cache
def cpu() -> Target:
    """The CPU of this machine, for figures alone: its machine code is not optimized."""
    return Target("CPU", jax.devices("cpu")[0], {"xla_backend_optimization_level": 0})


TARGETS: dict[str, Callable[[], Target]] = {"tpu": tpu, "gpu": gpu, "cpu": cpu}


def _require(module: str, what: str, install: str) -> None:
    parent = module.split(".")[0]
    if importlib.util.find_spec(parent) is None or importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"There is no module {module!r}: {what}. Install it: {install}", name=module)
