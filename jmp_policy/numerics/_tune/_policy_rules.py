"""From a set of scopes to the shortest map that keeps them out of a policy, and to the code that says it."""

import re
from collections.abc import Collection, Iterator, Sequence

from ..._base import list_paths_to
from ...policy import Policy, PolicyMap


def make_map(scopes: Sequence[str], kept: Collection[str], policy: Policy, kept_policy: Policy) -> PolicyMap:
    """The map under which some scopes have another policy than all the others.

    A scope is what runs right at a path: what is inside of it at longer paths is a scope of its own. A rule covers
    what is inside, so that there is one only where a scope differs from the one around it, and inner rules come first.
    Results leave a scope in the dtype in which they were computed, and the whole in the output dtype of the policy,
    unless the root is kept.

    Args:
      scopes: the paths of all scopes; the root's is the empty string.
      kept: those that have the other policy.
      policy: what the others have.
      kept_policy: the other policy.

    >>> import jmp_policy as jmp
    >>> low, full = map(jmp.get_policy, ("bfloat16", "float32"))
    >>> make_map(["", "a/x", "a/y", "b"], ["a/x", "a/y"], low, full).rules[0].key
    'a'
    """
    wanted = {scope: scope in kept for scope in scopes}
    paths = sorted({path for scope in scopes for path in list_paths_to(scope)} | {""})
    children: dict[str, list[str]] = {path: [] for path in paths}
    for path in paths:
        if path:
            children[path.rpartition("/")[0]].append(path)
    inner = {True: kept_policy.replace(output_dtype=None), False: policy.replace(output_dtype=None)}
    is_kept = wanted.get("", False)
    rules = [(re.escape(path), inner[of_path]) for path, of_path in _Tree(children, wanted).list_rules("", is_kept)]
    return PolicyMap(rules, inner[True] if is_kept else policy)


class _Tree:
    """Paths, and which of them are to be kept; for the others it does not matter."""

    def __init__(self, children: dict[str, list[str]], wanted: dict[str, bool]):
        self._children, self._wanted = children, wanted
        self._costs: dict[tuple[str, bool], int] = {}

    def list_rules(self, path: str, is_kept: bool) -> Iterator[tuple[str, bool]]:
        """The rules for what is inside of a path, inner ones first, where the path itself is kept or not."""
        for child in self._children[path]:
            chosen = self._choose(child, is_kept)
            yield from self.list_rules(child, chosen)
            if chosen != is_kept:
                yield child, chosen

    def _choose(self, path: str, outer: bool) -> bool:
        """Whether a path is to be kept, where the one around it is or is not."""
        if path in self._wanted:
            return self._wanted[path]
        return min((outer, not outer), key=lambda is_kept: (is_kept != outer) + self._count_rules(path, is_kept))

    def _count_rules(self, path: str, is_kept: bool) -> int:
        if (path, is_kept) not in self._costs:
            chosen = [(child, self._choose(child, is_kept)) for child in self._children[path]]
            self._costs[path, is_kept] = sum((c != is_kept) + self._count_rules(child, c) for child, c in chosen)
        return self._costs[path, is_kept]


def write_code(policy_map: PolicyMap) -> str:
    """Python that makes a map, one rule on a line.

    >>> import jmp_policy as jmp
    >>> print(write_code(jmp.PolicyMap({"head": "float32"}, "params=float32,compute=float16,output=none")))
    jmp.PolicyMap(
        {
            'head': 'params=float32,compute=float32,output=float32',
        },
        default='params=float32,compute=float16,output=none',
    )
    """
    default = None if policy_map.default is None else str(policy_map.default)
    rules = [f"        {rule.key!r}: {str(rule.policy)!r}," for rule in policy_map.rules]
    body = ["    {", *rules, "    },"] if rules else ["    {},"]
    return "\n".join(["jmp.PolicyMap(", *body, f"    default={default!r},", ")"])
