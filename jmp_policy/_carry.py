"""The carry of a recurrent cell: what one step hands to the next keeps its dtypes, as a scan requires."""

from typing import Any

import jax

from ._trees import cast_floating, is_floating


def keep_carry_dtypes(carry: Any, out: Any) -> Any:
    """The result of a step of a cell, its new carry in the dtypes of the old one.

    Cells make their first carry in param dtype. Most promote to it: the memory of an LSTM stays float32, and nothing
    is cast here. A `SimpleCell` returns what its layers computed, in compute dtype, which a scan refuses; widening
    that loses nothing. Making the first carry in compute dtype instead would round the memory of the others. A first
    carry narrower than what the cell computes in is rounded at each step: it chose the dtype to keep.

    Args:
      carry: the old carry, as the caller handed it over; `None` if there is none.
      out: `(new carry, output)`; anything else, and a new carry of another structure, is left as it is.
    """
    if carry is None or not isinstance(out, tuple) or len(out) != 2:
        return out
    new_carry, output = out
    if jax.tree.structure(new_carry) != jax.tree.structure(carry):
        return out
    return jax.tree.map(_cast_like, new_carry, carry), output


def _cast_like(new: Any, old: Any) -> Any:
    return cast_floating(new, old.dtype) if is_floating(old) else new
