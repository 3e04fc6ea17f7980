"""Random programs, as text, each with one fault planted: comments at its lines say what must be found.

All numbers are positive and between 0.2 and 4, and every statement is increasing, so that a number that is not finite
stays so to the end, and no infinities of two signs meet. What a loop runs is faulty in one turn: `a` is one there, and
zero elsewhere.
"""

import pathlib
import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from faults import Expected, read_comments
from meshes import make_mesh

HEAD = """import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
"""

ARGUMENTS = "h, a, z, m, x"
"""The numbers, one if faulty, zeros, a positive matrix, and what a fault that comes in with an argument is in."""

PLAIN = (
    "h = h * 0.5 + 0.7",
    "h = jnp.sqrt(h) + 0.1",
    "h = jnp.maximum(h, 0.2)",
    "h = h / 1.3 + 0.2",
    "h = jnp.log1p(h) + 0.3",
    "h = jnp.concatenate([h[1:], h[:1]])",
)
"""Statements that keep what is not finite."""

ACROSS = ("h = m @ h * 0.2 + 0.3",)
"""What needs all numbers, and so cannot stand in a part of them."""

SATURATING = ("h = jnp.tanh(h) + 0.5", "h = jnp.exp(-1.0 / h) + 0.4", "h = jnp.minimum(h, 4.0)")
"""Statements that keep nans, but not infinities."""

HARMLESS = (
    "h = h + jnp.exp(-1.0 / z)",
    "h = h + jnp.where(z > 0.0, jnp.log(z), 0.0)",
    "h = h + 1.0 / (1.0 / z)",
    "h = h + jnp.tanh(1.0 / z) - 1.0",
    "h = h + jnp.where(z > 0.0, z / z, 0.0)",
    "h = h + jnp.nan_to_num(z / z)",
)
"""Infinities and nans that do not reach `h`."""

HARMLESS_TURN = "h = h + jnp.exp(-1.0 / jnp.abs(t - 1.0))"

FORWARD: dict[str, tuple[str, ...]] = {
    "nan log": ("h = h + jnp.log(h + 1.0 - 9.0 * a)  # {}",),
    "nan sqrt": ("h = h + jnp.sqrt(h - 9.0 * a)  # {}",),
    "nan div": ("b = 1.0 - a", "h = h + b / b  # {}"),
    "nan rsqrt": ("h = h + lax.rsqrt(h - 9.0 * a) * 0.1  # {}",),
    "inf exp": ("h = h + jnp.exp(900.0 * a)  # {}",),
    "inf div": ("h = h + 1.0 / (1.0 - a)  # {}",),
    "inf mul": ("b = h + 1e30 * a", "h = h + b * b * 0.05  # {}"),
    "inf dot_general": ("b = h + 1e30 * a", "h = h + b @ b * 0.02  # {}"),
    "inf reduce_sum": ("b = h + 3e38 * a", "h = h + jnp.sum(b) * 0.05  # {}"),
    "inf integer_pow": ("h = h + (0.1 * h + 30.0 * a) ** 40  # {}",),
    "inf expm1": ("h = h + jnp.expm1(900.0 * a)  # {}",),
    "inf pow": ("h = h + jnp.power(2.0, 900.0 * a)  # {}",),
}
"""The statements of each fault; the comment stands where `{}` is."""

BACKWARD: dict[str, tuple[str, ...]] = {
    "inf mul": ("u = h * 1e30  # {}", "h = h + (u - lax.stop_gradient(u)) * (1e30 * a + 1e-30)"),
    "nan mul": (
        "r = jnp.sqrt(jnp.maximum(h - 9.0 * a, 0.0))  # {}",
        "h = jnp.where(a > 0.5, h, r + 0.5)",
    ),
    "nan log": (
        "@jax.custom_vjp",
        "def own(h, a):",
        "    return h * 1.0",
        "own.defvjp(",
        "    lambda h, a: (own(h, a), a),",
        "    lambda a, g: (g * jnp.log(2.0 - 9.0 * a), 0.0 * a),",
        ")",
        "h = own(h, a)  # {}",  # JAX gives equations of a backward rule the line of the call
    ),
    "nan sqrt": (
        # On one line: inside of a loop JAX gives a rule the line of the call, and elsewhere its own.
        "own = jax.custom_jvp(lambda h, a: h * 1.0); "
        "own.defjvps(lambda t, out, h, a: t * jnp.sqrt(2.0 - 9.0 * a), None); h = own(h, a)  # {}",
    ),
}
"""Faults whose results are finite, and whose gradients are not."""

LOOPS = ("scan", "reversed scan", "long scan", "while", "fori")
CALLS = ("jit", "cond", "switch", "remat", "vmap", "shard_map")
NOT_DIFFERENTIABLE = ("while", "fori")
ALONE = ("vmap", "shard_map"), ("custom_vjp",)
"""Of each of these, only one is around a fault."""


class RandomProgram(NamedTuple):
    text: str  # of a module with the function `fun` of `ARGUMENTS`
    has_gradient: bool  # whether it is the value and the gradient of the function that is not finite
    constructs: tuple[str, ...]  # around the fault, outermost first
    scope: str  # the `jax.named_scope` of the fault; may be the empty string
    argument: bool  # whether the fault comes in with the argument `x`

    @property
    def expected(self) -> dict[str, Expected]:
        """What comments of the text say of the origin and of its cause."""
        return read_comments(self.text.splitlines())

    def load(self, folder: pathlib.Path) -> Any:
        """Writes the text to a file, and returns the function."""
        file = folder / "random_program.py"
        file.write_text(self.text)
        module = ModuleType("random_program")
        module.__dict__["MESH"] = make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        exec(compile(self.text, str(file), "exec"), module.__dict__)
        return jax.value_and_grad(module.fun) if self.has_gradient else module.fun

    def make_arguments(self, *, is_faulty: bool = True) -> tuple[np.ndarray, ...]:
        """Its arguments; `is_faulty=False` are those at which it has no fault."""
        x = np.asarray([0, np.nan if self.argument and is_faulty else 0, 0, 0], np.float32)
        h = np.asarray([0.5, 1.0, 1.5, 2.0], np.float32)
        return h, np.float32(is_faulty), np.zeros(4, np.float32), np.full((4, 4), 0.5, np.float32), x


def make_program(seed: int) -> RandomProgram:
    """The program of a number: every second has something harmless before the fault."""
    draw = random.Random(seed)
    has_gradient = draw.random() < 0.6
    is_backward = has_gradient and draw.random() < 0.6
    is_argument = not is_backward and draw.random() < 0.08
    constructs = _draw_constructs(draw, has_gradient, is_backward)
    return _Writer(draw, has_gradient, is_backward, is_argument, constructs, harmless=seed % 2 == 0).write()


def _draw_constructs(draw: random.Random, has_gradient: bool, is_backward: bool) -> tuple[str, ...]:
    """Up to three constructs that go together."""
    calls = [*CALLS, *(["custom_vjp"] * 3 if has_gradient and not is_backward else ())]
    chosen: list[str] = []
    for _ in range(draw.choice([0, 1, 1, 2, 2, 2, 3])):
        name = draw.choice(LOOPS if draw.random() < 0.4 else calls)
        if name in NOT_DIFFERENTIABLE and has_gradient:
            continue
        if any(name in kinds and set(kinds) & set(chosen) for kinds in ALONE):
            continue
        # In a body, JAX gives all equations of a forward rule the line of the call.
        if name == "custom_vjp" and set(chosen) - {"vmap"}:
            continue
        # The cotangents of a turn vanish after hundreds more.
        if "long scan" in (name, *chosen) and set(LOOPS) & set(chosen) and name in LOOPS:
            continue
        chosen.append(name)
    return tuple(chosen)


class _Writer:
    def __init__(self, draw: random.Random, *facts: Any, harmless: bool):
        self._draw = draw
        self._has_gradient, self._is_backward, self._is_argument, self._constructs = facts
        self._lines = HEAD.splitlines()
        self._turns: list[int] = []
        self._kind, self._primitive = draw.choice(sorted(BACKWARD if self._is_backward else FORWARD)).split()
        self._scope = draw.choice(["", "", "plant"])
        self._converts = self._kind == "inf" and not self._is_backward and draw.random() < 0.3
        self._harmless_depth = draw.randint(0, len(self._constructs)) if harmless else -1

    def write(self) -> RandomProgram:
        self._add("")
        self._add("")
        self._add(f"def fun({ARGUMENTS}):")
        self._write_body(0, 4)
        if self._converts:
            self._add("    h = h + (h - h)  # origin: nan sub")
        self._add("    return jnp.sum(h)" if self._has_gradient else "    return h")
        text = "\n".join(self._lines) + "\n"
        return RandomProgram(text, self._has_gradient, self._constructs, self._scope, self._is_argument)

    def _add(self, *lines: str, indent: int = 0) -> None:
        self._lines += [" " * indent + line if line else line for line in lines]

    def _write_body(self, depth: int, indent: int) -> None:
        """The statements of one level: some, what is harmless, the next level or the fault, and some more."""
        inside = self._constructs[:depth]
        self._write_plain(indent, inside)
        if depth == self._harmless_depth:
            in_loop = bool(inside) and inside[-1] in LOOPS
            self._add(self._draw.choice([HARMLESS_TURN] if in_loop else HARMLESS), indent=indent)
            self._write_plain(indent, inside)
        if depth == len(self._constructs):
            self._write_fault(indent)
        else:
            self._write_construct(depth, indent)
        self._add(PLAIN[0], indent=indent)
        self._write_plain(indent, inside)

    def _write_plain(self, indent: int, inside: Sequence[str]) -> None:
        pool = [*PLAIN, *(() if "shard_map" in inside else ACROSS)]
        if self._kind == "nan" and not self._is_backward:
            pool += SATURATING
        self._add(*self._draw.choices(pool, k=self._draw.randint(0, 2)), indent=indent)

    def _write_fault(self, indent: int) -> None:
        if self._scope:
            self._add(f'with jax.named_scope("{self._scope}"):', indent=indent)
            indent += 4
        if self._is_argument:
            self._add("h = h + x", indent=indent)
            return
        role = "cause" if self._converts else "origin"
        turns = "".join(f" {turn}" for turn in self._turns)
        said = f"{role}: {self._kind} {self._primitive}{self._find_pass()}{turns}"
        if self._is_backward and f"{self._kind} {self._primitive}" == "nan mul":
            said += f" # cause: inf div{' recomputed' if 'remat' in self._constructs else ''}{turns}"
        fault = (BACKWARD if self._is_backward else FORWARD)[f"{self._kind} {self._primitive}"]
        self._add(*(line.format(said) for line in fault), indent=indent)

    def _find_pass(self) -> str:
        if not self._is_backward:
            return ""
        if self._primitive != "sqrt":
            return " backward"
        return " recomputed" if "remat" in self._constructs else ""

    def _write_construct(self, depth: int, indent: int) -> None:
        name = self._constructs[depth]
        run = f"run{depth}"
        length = 80 if name == "long scan" else self._draw.randint(3, 5)
        turn = self._draw.randrange(length - 2, length) if name == "long scan" else self._draw.randrange(length)
        if name in LOOPS:
            self._turns.append(turn)
            self._add(f"def {run}(h, t, a=a):", f"    a = jnp.where(t == {turn}, a, 0.0)", indent=indent)
        else:
            self._add(f"def {run}(h, a, z, x):", indent=indent)
        if name == "shard_map":
            self._add('    a = jnp.where(lax.axis_index("d") == 1, a, 0.0)', indent=indent)
        self._write_body(depth + 1, indent + 4)
        self._add("    return h", indent=indent)
        self._add(*_CALLS[name].format(run=run, length=length).splitlines(), indent=indent)


_CALLS = {
    "scan": "h = lax.scan(lambda h, t: ({run}(h, t), None), h, jnp.arange({length}.0))[0]",
    "reversed scan": "h = lax.scan(lambda h, t: ({run}(h, t), None), h, jnp.arange({length}.0), reverse=True)[0]",
    "long scan": "h = lax.scan(lambda h, t: ({run}(h, t), None), h, jnp.arange({length}.0))[0]",
    "while": "h = lax.while_loop(lambda s: s[0] < {length}, lambda s: (s[0] + 1, {run}(s[1], s[0])), (0.0, h))[1]",
    "fori": "h = lax.fori_loop(0, (m[0, 0] * 2 * {length}).astype(int), lambda t, h: {run}(h, t.astype(float)), h)",
    "jit": "h = jax.jit({run})(h, a, z, x)",
    "cond": "h = lax.cond(m[0, 0] > 0, {run}, lambda h, a, z, x: h / z, h, a, z, x)",
    "switch": "h = lax.switch(m.astype(int)[0, 0] + 1, [lambda h, a, z, x: h / z, {run}], h, a, z, x)",
    "remat": "h = jax.checkpoint({run})(h, a, z, x)",
    "vmap": "h = jax.vmap({run}, (0, 0, None, None))(jnp.stack([h, h]), jnp.stack([0.0 * a, a]), z, x)[1]",
    "shard_map": """{run} = jax.shard_map({run}, mesh=MESH, in_specs=(P("d"), P(), P("d"), P("d")), out_specs=P("d"))
h = {run}(h, a, z, x)""",
    "custom_vjp": """own = jax.custom_vjp({run})
own.defvjp(lambda *args: ({run}(*args), args[1:]), lambda args, g: (g * 0.7, *(0 * arg for arg in args)))
h = own(h, a, z, x)""",
}
"""How each construct is called."""
