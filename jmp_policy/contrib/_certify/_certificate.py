"""`Certificate`: the result of `contrib.certify`."""

import dataclasses
import os

from ..._base import PyTree, escape_controls
from ._faults import FAULTS


@dataclasses.dataclass(frozen=True, eq=False)
class Certificate:
    """Proof that a function is safe in its dtypes for all inputs in some ranges, or an input that breaks it.

    Attributes:
      holds: True if it is proved that no operation has one of the four faults below, False if `counterexample` has
        one, None if the analysis cannot tell. `bool(certificate)` is True only if it is proved.
      fault: the first fault, or possible fault if `holds` is None. `"overflow"`: finite operands give infinity.
        `"division by zero"`: also the logarithm of zero, and a power or `rsqrt` of zero. `"invalid operation"`: other
        operations that return nan, such as the root of a negative number, and reading at an index out of bounds.
        `"cancellation"`: a difference that is never zero in exact arithmetic can be zero, as of `1 - sigmoid(x)`. Else
        the reason why the analysis gave up, such as `"it has no rule"`. Empty if `holds` is True.
      primitive: the name of the operation with this fault.
      dtype: the dtype of its result.
      source: the user's line of this operation, `"/home/me/loss.py:12"`.
      operands: the smallest and largest element of each of its operands: of the counterexample, or if `holds` is None
        the ranges that the analysis found, which may be larger than the real ones.
      counterexample: the arguments, as NumPy arrays in the ranges and in the dtypes in which the function gets them,
        for which the operation has the fault. None unless `holds` is False.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> x = jax.ShapeDtypeStruct((2,), jnp.float32)
    >>> certificate = jmp.contrib.certify(lambda x: jnp.exp(x) - x, [(0, 100)])(x)
    >>> certificate.holds, certificate.fault, certificate.primitive, certificate.operands
    (False, 'overflow', 'exp', ((100.0, 100.0),))
    >>> certificate.counterexample
    (array([100., 100.], dtype=float32),)
    """

    holds: bool | None
    fault: str = ""
    primitive: str = ""
    dtype: str = ""
    source: str = ""
    operands: tuple[tuple[float, float], ...] = ()
    counterexample: PyTree = None

    def __bool__(self) -> bool:
        return self.holds is True

    def __str__(self) -> str:
        """Returns one sentence: the fault, the operation and its operands."""
        if self.holds:
            return f"proved: no {', '.join(FAULTS[:-1])} or {FAULTS[-1]}"
        ranges = " and ".join(f"{low:.4g} to {high:.4g}" for low, high in self.operands)
        place = f"`{self.primitive}` ({self.dtype})" if self.primitive else "a constant nan that is returned"
        place += f", {os.path.basename(self.source)}" * bool(self.source) + f", of {ranges}" * bool(ranges)
        if self.holds is None:
            why = f"{self.fault} may occur in" if self.fault in FAULTS else f"{self.fault}:"
            return escape_controls(f"cannot tell: {why} {place}", keep="")
        return escape_controls(f"broken: {self.fault} in {place}", keep="")
