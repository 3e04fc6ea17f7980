"""The explanation: a row per module, what was amiss with the rules, and totals."""

import dataclasses
from typing import Any

from .._policy import Policy
from ._lookup import row_at


@dataclasses.dataclass(frozen=True)
class Row:
    """What holds at one module, and which dtypes were seen there.

    Attributes:
      path: the module names joined by `/`; the root's is the empty string.
      type: the name of its class.
      policy: the policy that holds for it, or `None`.
      rule: where that came from: the key of a map's rule, `"default"` where none covers the module, `"its own
        policy"`, `"inherited"` from the module around it, `"author's dtype"`, or the empty string without a policy.
      param_dtypes: the dtypes of its own parameters, without those of the modules inside.
      input_dtypes: the dtypes of the arrays it was called with, before any cast.
      compute_dtypes: the dtypes that the operations in its own code read, conversions excepted.
      output_dtypes: the dtypes of the arrays it returned, after any cast.
      param_bytes: the size of its own parameters.
      float32_bytes: their size if they were float32.
      leaks_into: the paths of the modules whose own code computes in a wider dtype than is meant there, because of
        what this one, which a rule or its author names, returned.
      quantization: the format of its weight under a quantized policy, such as `"int8"`, or why the weight is left as
        it is: `"left: 64 elements are fewer than min_size=4096"`; the empty string without such a policy or weight.
        Of float8 it says what the products of this very call were computed in.
      half_sums: the sums and products of many numbers that its own code takes in half precision, such as
        `"reduce_window_sum of 4096 numbers in bfloat16"`, a global `nn.avg_pool`: their errors grow with the count.
    """

    path: str
    type: str
    policy: Policy | None
    rule: str
    param_dtypes: tuple[str, ...]
    input_dtypes: tuple[str, ...]
    compute_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    param_bytes: int
    float32_bytes: int
    leaks_into: tuple[str, ...]
    quantization: str = ""
    half_sums: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain strings, numbers and lists."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        return plain | {"policy": None if self.policy is None else self.policy.name}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `jmp_policy.explain` found: a table in a terminal, and in a notebook.

    Attributes:
      rows: one for each module, the root first.
      unused: a sentence for each rule of a map that decided for no module.
      unknown: a sentence for each module of which it is not known where it stands: one that its caller runs through
        linen's `.apply`, and does not hold.
    """

    rows: tuple[Row, ...]
    unused: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The size of all parameters."""
        return sum(row.param_bytes for row in self.rows)

    @property
    def float32_bytes(self) -> int:
        """Their size if they were float32."""
        return sum(row.float32_bytes for row in self.rows)

    def __getitem__(self, path: str) -> Row:
        """The row of the module at a path.

        Raises:
          KeyError: there is no such row.
        """
        return row_at(self.rows, path, "module", "explained")

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain dictionaries, lists, strings and numbers, for tests and for JSON."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "unused": list(self.unused),
            "unknown": list(self.unknown),
            "total_bytes": self.total_bytes,
            "float32_bytes": self.float32_bytes,
        }

    def __str__(self) -> str:
        from ._text import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from ._html import as_html

        return as_html(self)
