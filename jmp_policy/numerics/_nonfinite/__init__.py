"""Finds the origin of non-finite values, inside `jit`."""

from ._first_nonfinite import first_nonfinite as first_nonfinite, search_nonfinite as search_nonfinite
from ._origin import NonfiniteOrigin as NonfiniteOrigin
from ._remedies import reaches_pole as reaches_pole
