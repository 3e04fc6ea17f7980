"""Mixed precision for any JAX function, per operation."""

import typing as _typing

from .._base import load_lazily as _load_lazily
from ._autocast import autocast as autocast

if _typing.TYPE_CHECKING:
    from ._rules import AutocastRules as AutocastRules

    # for other packages of the library
    # isort: off
    # fmt: off
    from ._casting import make_casting_rule  # noqa: F401
    from ._own_products import multiplies_by_weights, quantize_products  # noqa: F401
    from ._weights import OwnWeight, WeightFormat, Weights, find_own_weights  # noqa: F401
    from ._place import AS_TRACED, EquationPlace, Functions, check_policy, is_mixed, root_policy  # noqa: F401
    from ._tables import FULL, FULL_IN_FLOAT16, FUNCTIONS, INFER, LOW, SATURATING, WIDE  # noqa: F401
    # fmt: on
    # isort: on
else:  # loads the tables when they are first used
    _SOURCES = {
        "_rules": "AutocastRules",
    }
    _INTERNAL = {
        "_casting": "make_casting_rule",
        "_own_products": "multiplies_by_weights quantize_products",
        "_weights": "OwnWeight WeightFormat Weights find_own_weights",
        "_place": "AS_TRACED EquationPlace Functions check_policy is_mixed root_policy",
        "_tables": "FULL FULL_IN_FLOAT16 FUNCTIONS INFER LOW SATURATING WIDE",
    }
    __getattr__, __dir__ = _load_lazily(__name__, _SOURCES, globals(), internal=_INTERNAL)
