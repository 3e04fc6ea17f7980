"""Mixed precision for any JAX function, operation by operation."""

from ._autocast import autocast as autocast
from ._rules import AutocastRules as AutocastRules
