"""Module paths out of name stacks."""

import re


def path_of(scope: str) -> str:
    """The scopes of a name stack without what transformations and methods add.

    >>> path_of("transpose(jvp(Net))/encoder/encoder.encode/dense/...ab,bc->...ac")
    'Net/encoder/dense/...ab,bc->...ac'
    """
    names = [name for name in re.sub(r"\w+\(|\)", "", scope).split("/") if name not in _NOT_OF_MODULES]
    path: list[str] = []
    for name in names:
        if not path or name.partition(".")[0] != path[-1]:
            path.append(name)
    return "/".join(path)


_NOT_OF_MODULES = frozenset(("", "rematted_computation", "checkpoint", "force_full_precision"))
