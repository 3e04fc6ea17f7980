"""Paths of modules: their names joined by `/`. The path of the root is the empty string."""


def list_paths_to(path: str) -> list[str]:
    """The paths of the modules around a path, the root first, and at the end the path itself.

    >>> list_paths_to("blocks/0"), list_paths_to("")
    (['', 'blocks', 'blocks/0'], [''])
    """
    names = path.split("/") if path else []
    return ["/".join(names[:n]) for n in range(len(names) + 1)]
