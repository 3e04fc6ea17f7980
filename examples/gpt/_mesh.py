"""The mesh of a run: how many devices along which axes, and whether model, batch and machine fit it."""

import dataclasses

import jax
from jax.sharding import AxisType, Mesh

from jmp_policy._base import did_you_mean
from jmp_policy.cli import UserError

from ._gpt import GPTConfig


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices there are along each axis.

    Attributes:
      data: along which the windows of a batch are split, and all else is copied.
      fsdp: along which the windows and, at rest, parameters and optimizer are split.
      tensor: along which heads, wide layers and the vocabulary are split, at rest and at work.

    >>> str(MeshShape(data=2, tensor=4)), MeshShape(data=2, tensor=4).size
    ('data=2,tensor=4', 8)
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Reads what `--mesh` is given.

        Raises:
          UserError: it is not axes and sizes.

        >>> MeshShape.parse("data=2,fsdp=2")
        MeshShape(data=2, fsdp=2, tensor=1)
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = (piece.strip() for piece in part.partition("="))
            if axis not in AXES:
                raise UserError(f"--mesh {text}: there is no axis {axis!r}. {did_you_mean(axis, AXES)}")
            if axis in sizes:
                raise UserError(f"--mesh {text}: {axis} is there twice, for example: data=2,fsdp=2")
            if not size.isdecimal() or int(size) < 1:
                raise UserError(f"--mesh {text}: {axis} needs a number of devices, got {size!r}, for example: {axis}=2")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self).items()
        return ",".join(f"{axis}={size}" for axis, size in sizes if size > 1) or "data=1"

    def check_sizes(self, model: GPTConfig, batch_size: int) -> None:
        """Checks that each axis divides what is split along it.

        Raises:
          UserError: one does not.
        """
        _check_divides("data * fsdp", self.data * self.fsdp, batch_size, "windows of a batch")
        _check_divides("fsdp", self.fsdp, model.width, "channels of the model")
        _check_divides("tensor", self.tensor, model.heads, "heads of the model")
        _check_divides("tensor", self.tensor, model.vocabulary, "tokens of the vocabulary")

    def make_mesh(self) -> Mesh:
        """The mesh, of the first devices; of several processes, of all devices.

        Raises:
          UserError: there are not so many, or some process would have none of them.
        """
        found, processes = jax.device_count(), jax.process_count()
        if self.size > found or (processes > 1 and self.size < found):
            raise UserError(self._explain_size(found, processes))
        sizes = dataclasses.asdict(self)
        # XLA places what the constraints of `_sharding.py` leave open, and so the model is written as for one device.
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    def _explain_size(self, found: int, processes: int) -> str:
        has = f"the {processes} processes have {found} in all" if processes > 1 else f"JAX finds {found}"
        said = f"--mesh {self} needs {self.size} devices, and {has}"
        if self.size < found:
            return f"{said}: all must be in the mesh, for example --mesh data={found}"
        each, rest = divmod(self.size, processes)
        if jax.default_backend() != "cpu" or rest:
            return f"{said}: for example --mesh data={found}"
        return f"{said}. JAX makes as many as it is told of a CPU: set JAX_NUM_CPU_DEVICES={each}"


AXES = tuple(field.name for field in dataclasses.fields(MeshShape))


def _check_divides(axes: str, size: int, count: int, what: str) -> None:
    if count % size:
        fitting = max(number for number in range(1, min(size, count + 1)) if count % number == 0)
        raise UserError(f"--mesh: {axes} = {size} does not divide the {count} {what}; {fitting} would")
