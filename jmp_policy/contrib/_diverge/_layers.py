"""Pairs the scopes of layers in a scan with the numbered scopes of layers in a Python loop."""

import re
from collections.abc import Iterable, Mapping, Sequence


def pair_layers(scanned: Mapping[str, int], numbered: Iterable[str]) -> dict[str, list[str]]:
    """Pairs scopes in a scan, such as `layers/mlp`, with numbered ones, such as `layers_0/mlp` or `layer/0/mlp`.

    Args:
      scanned: the number of layers of each scope in a scan.
      numbered: other paths.

    Returns:
      The paths of all layers, in order, by the path in the scan.
    """
    families, found = list_families(numbered), {}
    for path, count in scanned.items():
        options = [family for key, family in families.items() if path in _name_scans(*key) and len(family) == count]
        if len(options) == 1 and set(options[0]) == set(range(count)):
            found[path] = [options[0][i] for i in range(count)]
    return found


def list_families(paths: Iterable[str]) -> dict[tuple[str, str], dict[int, str]]:
    """Groups paths that differ in one number, by the text before and after it."""
    families: dict[tuple[str, str], dict[int, str]] = {}
    for path in paths:
        for match in re.finditer(r"(\d+)(?=/|$)", path):
            stem = path[: match.start()].rstrip("/_")
            families.setdefault((stem, path[match.end() :]), {})[int(match[0])] = path
    return families


def _name_scans(stem: str, rest: str) -> Sequence[str]:
    return f"{stem}{rest}", f"{stem}s{rest}"
