"""What is Flax's, known by name because the library does without Flax until it is needed."""

from ._memory import remember_weakly


def is_flax_object(node: object) -> bool:
    """Whether a node of a tree is an object of Flax's that a call may write to: a module, or an nnx Variable.

    A cast would copy it, and what the call writes would be lost: the RNG streams that a caller passes to a model, its
    optimizer and its metrics are trees of Variables, and a copied stream gives the same random numbers for ever.
    """
    return _is_flax_class(type(node))


@remember_weakly
def _is_flax_class(kind: type) -> bool:
    packages = ("flax.linen.", "flax.nnx.")
    return any(b.__name__ in ("Module", "Variable") and b.__module__.startswith(packages) for b in kind.__mro__)
