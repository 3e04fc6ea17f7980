"""A trainer on a mesh: one that was made for one device, with its arrays split."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jmp_policy._base import PyTree
from jmp_policy.loss_scale import LossScale
from jmp_policy.numerics import AuditReport, Provenance, Stats

from ._sharding import place_state
from ._trainer import Trainer


class MeshTrainer:
    """A `Trainer` whose state lies on a mesh: another one, made for one device, with its arrays put there.

    Every process draws all parameters, which at this size is cheap, and keeps its part. So a run begins with the same
    bits on every mesh.
    """

    def __init__(self, trainer: Trainer, mesh: Mesh):
        self._trainer, self._mesh = trainer, mesh
        self.state = trainer.state

    @property
    def state(self) -> PyTree:
        """All that a checkpoint must hold."""
        return self._trainer.state

    @state.setter
    def state(self, state: PyTree) -> None:
        self._trainer.state = place_state(state, self._mesh)

    @property
    def params(self) -> PyTree:
        """The parameters."""
        return self._trainer.params

    @property
    def opt_state(self) -> PyTree:
        """The state of the optimizer."""
        return self._trainer.opt_state

    def step(self, windows: jax.typing.ArrayLike) -> jax.Array:
        """Trains on one batch; returns its loss."""
        with jax.set_mesh(self._mesh):
            return self._trainer.step(windows)

    def loss_fn(self, params: PyTree, windows: jax.typing.ArrayLike) -> jax.Array:
        """The loss of given parameters."""
        with jax.set_mesh(self._mesh):
            # Many programs that are under way can take all threads of XLA:CPU, and then each waits for other devices.
            return jax.block_until_ready(self._trainer.loss_fn(params, windows))

    def audit(self, windows: jax.typing.ArrayLike) -> AuditReport:
        """Audits the step, without running it."""
        with jax.set_mesh(self._mesh):
            return self._trainer.audit(windows)

    def find_origin(self, windows: jax.typing.ArrayLike, scale: LossScale) -> Provenance:
        """Finds what made the gradients of a step not finite."""
        with jax.set_mesh(self._mesh):
            return self._copy(self._trainer.find_origin(windows, scale))

    def observe(self, windows: jax.typing.ArrayLike, where: str = "matmuls") -> Stats:
        """Measures operations and gradients of the step."""
        with jax.set_mesh(self._mesh):
            return self._copy(self._trainer.observe(windows, where))

    def _copy(self, tree: PyTree) -> PyTree:
        """Gives every device all of what is read on the host."""
        return jax.jit(lambda tree: tree, out_shardings=NamedSharding(self._mesh, P()))(tree)
