"""Warnings about dtypes that an author wrote on layers, which win over the policy."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...policy import Policy

_FEWEST = 3
"""With fewer written dtypes than this, the author may have meant them."""


def find_wider_dtype(written: Any, policy: Policy) -> np.dtype | None:
    """Returns the dtype that an author wrote on a layer if it is wider than the compute dtype, else `None`."""
    if written is None or policy.compute_dtype is None:
        return None
    try:
        dtype = np.dtype(written)
    except TypeError:  # the author's own field happens to be called `dtype`
        return None
    return dtype if dtype.itemsize > policy.compute_dtype.itemsize else None


def describe_written_dtypes(layers: Mapping[str, np.dtype | None], example: str) -> list[str]:
    """Returns a warning, in a list, if most layers have a wider dtype than their policy (`layers`, by path)."""
    wide = {path: dtype for path, dtype in layers.items() if dtype is not None}
    if len(wide) < _FEWEST or 2 * len(wide) <= len(layers):
        return []
    path, dtype = next(iter(wide.items()))
    return [
        f"{len(wide)} of {len(layers)} layers with weights compute in the dtype that their author wrote, not in the "
        f"compute dtype of the policy: {path!r} has dtype={dtype.name}. Write dtype=None, which the policy fills in, "
        f"or use autocast, which casts each operation. For example: {example}."
    ]
