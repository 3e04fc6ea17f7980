"""The result of `numerics.lock`, and its file."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from ..report import Plain
from ._lock_diff import LockDiff, compare_rows
from ._lock_rows import IN_KEYS, LockRow, escape, is_fact, read_line, unescape, write_lines

_TITLE = "# Precision of a program, from jmp_policy. Do not edit it: write it anew, and read the difference."
_FORMAT = "1"


@dataclasses.dataclass(frozen=True, repr=False)
class Lock(Plain):
    """Result of `numerics.lock`: what a program computes in which dtype. Prints as the text of its file.

    Attributes:
      rows: the facts. Their order does not count.
      function: the name of the function.
      platform: `"cpu"`, `"tpu"` or `"cuda"`.
      compiled: the device that the program was compiled for; empty for facts of the jaxpr.
      versions: pairs of a package and its version.
      policies: pairs of a module path, with a rule of its map, and the policy, for the causes of differences.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> dense = lambda w, x: x.astype(jnp.bfloat16) @ w
    >>> w, x = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16), jax.ShapeDtypeStruct((2, 8), jnp.float32)
    >>> locked = jmp.numerics.lock(dense, platform="tpu")(w, x)
    >>> for row in locked.rows:
    ...     print(row)
    w | argument | bfloat16 | shape 8x4
    x | argument | float32 | shape 2x8
    . | forward cast | float32 -> bfloat16 | 16 elements
    . | forward matmul | bfloat16 x bfloat16 -> bfloat16 | 1 time
    result | result | bfloat16 | shape 2x4
    >>> bool(locked.diff(jmp.numerics.lock(dense, platform="tpu")(w, x)))
    False
    """

    rows: tuple[LockRow, ...]
    function: str
    platform: str
    compiled: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    policies: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"<Lock of {self.function}: {len(self.rows)} facts; print it for its file>"

    def __str__(self) -> str:
        lines = write_lines(self.rows)
        header = {"format": _FORMAT, "function": self.function, "platform": self.platform}
        header |= {"compiled for": self.compiled} if self.compiled else {}
        header |= dict(self.versions) | {
            f"{_POLICY}{escape(place, IN_KEYS)}": policy for place, policy in self.policies
        }
        header["digest"] = _sum_lines(lines)
        return "\n".join([_TITLE, *(f"{key}: {' '.join(text.split())}" for key, text in header.items()), "", *lines])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file. A file that is there is replaced if it is a lock.

        Raises:
          ValueError: there is a file of another kind.
          OSError: the file cannot be written.
        """
        path = Path(path)
        if path.exists() and path.stat().st_size:
            _check_title(path, path.read_text(encoding="utf-8", errors="replace").partition("\n")[0])
        path.write_text(f"{self}\n", encoding="utf-8", newline="\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Lock":
        """Reads a file that `save` wrote.

        Raises:
          ValueError: the file is not a lock, was edited, or is of a newer version of this package.
          FileNotFoundError: there is no file.
        """
        title, *lines = Path(path).read_text(encoding="utf-8-sig", errors="replace").splitlines() or [""]
        _check_title(path, title)
        middle = lines.index("") if "" in lines else len(lines)
        pairs = [(key, text) for key, _, text in (line.partition(": ") for line in lines[:middle])]
        header, facts = dict(pairs), [line for line in lines[middle + 1 :] if line]
        if header.get("format", "") > _FORMAT:
            raise ValueError(
                f"{path} has format {header['format']}, and this version of jmp_policy reads {_FORMAT}: update it. "
                "For example: pip install --upgrade jmp-policy."
            )
        bad = next((line for line, (_, text) in zip(lines, pairs, strict=False) if not text), None)
        bad = bad or next((line for line in facts if not is_fact(line)), None)
        if bad is not None:
            raise ValueError(f"{path}, line {lines.index(bad) + 2}: {bad[:60]!r} is not a line of a lock. {_ANEW}")
        if header.get("digest") != _sum_lines(facts) or len(header) < len(pairs) or "platform" not in header:
            raise ValueError(f"{path}: its digest is not that of its lines, which were edited or merged. {_ANEW}")
        rows = tuple(row for line in facts for row in read_line(line))
        versions = tuple((key, text) for key, text in header.items() if key in VERSIONS)
        given = tuple(
            (unescape(key.removeprefix(_POLICY)), text) for key, text in header.items() if key.startswith(_POLICY)
        )
        function, platform, device = (header.get(key, "") for key in ("function", "platform", "compiled for"))
        return cls(rows, function, platform, device, versions, given)

    def diff(self, other: "Lock") -> LockDiff:
        """Compares this lock with a newer one, `other`. The difference is false if no fact differs.

        >>> import jax, jax.numpy as jnp, jmp_policy as jmp
        >>> x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        >>> locked = jmp.numerics.lock(lambda x: x @ x)(x)
        >>> now = jmp.numerics.lock(lambda x: jnp.dot(x, x, precision="highest"))(x)
        >>> [difference] = locked.diff(now).rows
        >>> difference.fact, difference.cause
        ('forward matmul', 'its precision changed')
        """
        settings = _find_changes(self._targets, other._targets)
        rows = compare_rows(self.rows, other.rows, _find_changes(self.policies, other.policies), settings)
        notes = [*settings, *_find_changes(self.versions, other.versions)]
        return LockDiff(rows, self.function, tuple(f"{name}: {old}, now {new}" for name, old, new in notes))

    @property
    def _targets(self) -> tuple[tuple[str, str], ...]:
        return ("platform", self.platform), ("compiled for", self.compiled or "nothing")


def _check_title(path: str | os.PathLike[str], title: str) -> None:
    if title.strip() != _TITLE:
        raise ValueError(
            f"{path} is not a lock, and was not changed: it starts with {title[:60]!r}. Pass another name. "
            "For example: 'numerics.lock'."
        )


VERSIONS = ("jmp_policy", "jax", "flax", "optax")
"""The packages whose versions a lock names."""

_POLICY = "policy "

_ANEW = (
    "Write it anew. For example: JMP_UPDATE_LOCKS=1 pytest, or jmp-policy lock train:train_step --args train:make_args."
)


def _find_changes(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Lists the keys whose texts differ, with both texts; without a text it is `"none"`."""
    before, after = dict(old), dict(new)
    keys = dict.fromkeys((*before, *after))
    found = [(key, before.get(key, "none"), after.get(key, "none")) for key in keys]
    return [change for change in found if change[1] != change[2]]


def _sum_lines(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
