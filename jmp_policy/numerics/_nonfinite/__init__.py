"""Finds the origin of non-finite values, inside `jit`."""

from ._first_nonfinite import first_nonfinite as first_nonfinite, search_nonfinite as search_nonfinite
from ._origin import NonfiniteOrigin as NonfiniteOrigin
from ._remedies import has_pole as has_pole
