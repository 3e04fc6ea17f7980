"""Meshes of several devices, on machines with any number."""

from typing import Any

import jax
import numpy as np


def find_devices(count: int) -> list[Any]:
    """Devices of the default platform, or of the CPU, which has four in all tests, where there are not so many."""
    devices = jax.devices()
    return (devices if len(devices) >= count else jax.devices("cpu"))[:count]


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...], **options: Any) -> jax.sharding.Mesh:
    """`jax.make_mesh` on those devices."""
    return jax.make_mesh(shape, names, devices=find_devices(int(np.prod(shape))), **options)
