"""Telling of dtypes that the author of a model wrote, and that keep most of it out of the dtype of its policy."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...policy import Policy

_FEWEST = 3
"""Of a model with fewer such layers it may well be meant."""


def find_wider_dtype(written: Any, policy: Policy) -> np.dtype | None:
    """The dtype that an author wrote on a layer, if it is wider than the policy's; `None` otherwise."""
    if written is None or policy.compute_dtype is None:
        return None
    try:
        dtype = np.dtype(written)
    except TypeError:  # a field of the author's own, which is not a dtype
        return None
    return dtype if dtype.itemsize > policy.compute_dtype.itemsize else None


def describe_written_dtypes(layers: Mapping[str, np.dtype | None], example: str) -> list[str]:
    """A sentence, if an author's dtypes keep most layers out of the dtype of their policy.

    Args:
      layers: by path, for each layer with a weight: the wider dtype that is written on it, if one is.
      example: how to run such a model under autocast.
    """
    wide = {path: dtype for path, dtype in layers.items() if dtype is not None}
    if len(wide) < _FEWEST or 2 * len(wide) <= len(layers):
        return []
    path, dtype = next(iter(wide.items()))
    return [
        f"{len(wide)} of {len(layers)} layers with weights compute in the dtype that their author wrote, and not in "
        f"that of the policy; {path!r}, for one, has dtype={dtype.name}. Leave it open, dtype=None, and the policy "
        f"fills it in; or give the model as it is written to autocast, which rewrites its operations: {example}."
    ]
