"""Finds the origin of non-finite values, inside `jit`."""

from ._first_nonfinite import first_nonfinite as first_nonfinite
from ._provenance import NOTHING as NOTHING, Provenance as Provenance
from ._remedies import has_pole as has_pole
