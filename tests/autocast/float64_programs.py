"""Six programs of science in float64, each with the scopes that need it, known by analysis.

With `kept` in float64 and all other matmuls in float32, the error is below a tenth of the tolerance. With one scope of
`kept` in float32, it is above ten times the tolerance. The rule "float32" runs all operations of a scope in float32:
under it all scopes but `needed` together, of which `low` have the most work, cost less than a tenth of the tolerance,
and each one of `needed` more than ten times.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular

scope = jax.named_scope


@dataclasses.dataclass(frozen=True)
class Program:
    fun: Callable[..., Any]
    draw: Callable[[np.random.Generator], tuple]
    tolerance: float
    kept: tuple[str, ...]
    low: tuple[str, ...]
    needed: tuple[str, ...]

    def run(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Adds the gradients of a loss."""
        return jax.value_and_grad(fun) if self.fun is find_negative_likelihood else fun


def draw_orthogonal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(rows, columns)))[0]


def draw_least_squares(rng):
    """A matrix with a condition number of 100, and targets that it does not fit."""
    left, right = draw_orthogonal(rng, 60, 12), draw_orthogonal(rng, 12, 12)
    matrix = left * np.geomspace(1, 1e-2, 12) @ right.T
    return matrix, matrix @ rng.normal(size=12) + rng.normal(size=60)


def refine_least_squares(matrix, target):
    """Solves normal equations and refines. The solution is as good as the residual; the factors only set the speed."""
    with scope("gram"):
        gram = matrix.T @ matrix
    with scope("factor"):
        factor = jnp.linalg.cholesky(gram)

    def refine(x, _):
        with scope("residual"):
            residual = matrix.T @ (target - matrix @ x)
        with scope("correct"):
            half = solve_triangular(factor, residual, lower=True)
            change = solve_triangular(factor, half, lower=True, trans=1)
        with scope("update"):
            return x + change, None

    return lax.scan(refine, jnp.zeros_like(matrix[0]), length=10)[0]


def draw_newton(rng):
    """A stiffness matrix with a condition number of 1e3, and a basis at the points of a quadrature."""
    mix = draw_orthogonal(rng, 16, 16)
    return draw_orthogonal(rng, 64, 16) * 8, mix * np.geomspace(1, 1e3, 16) @ mix.T, rng.normal(size=16)


def solve_by_newton(basis, stiffness, load):
    """Solves K c + B.T (B c)**3 / q = f. The root is where the residual says; the Jacobian only sets the speed."""

    def iterate(state):
        c, _, count = state
        with scope("residual"):
            residual = stiffness @ c + basis.T @ (basis @ c) ** 3 / len(basis) - load
        with scope("jacobian"):
            slope = 3 * (basis @ c) ** 2
            jacobian = stiffness + basis.T @ (slope[:, None] * basis) / len(basis)
        with scope("solve"):
            change = jnp.linalg.solve(jacobian, residual)
        with scope("update"):
            return c - change, jnp.linalg.norm(change), count + 1

    start = jnp.zeros_like(load), jnp.asarray(jnp.inf, load.dtype), 0
    return lax.while_loop(lambda state: (state[1] > 1e-13) & (state[2] < 30), iterate, start)[0]


def draw_leapfrog(rng):
    """Springs around points of rest that are a thousand times as far from the origin as they swing."""
    mix = draw_orthogonal(rng, 16, 16)
    springs = mix * np.linspace(0.5, 2, 16) @ mix.T
    # Given to seven digits: rounding them in each step alike would add up.
    springs, pull = (np.float64(np.float32(a)) for a in (springs, springs @ rng.uniform(800, 1200, size=16)))
    rest = np.linalg.solve(springs, pull)
    return springs, pull, rest, rest + rng.normal(size=16), rng.normal(size=16)


def integrate_by_leapfrog(springs, pull, rest, q, p):
    """Returns the energy above that at rest, ten times in 10,000 steps.

    The energy is a small difference of large terms. The error of a force is multiplied by the step, 1e-4; that of a
    position is not.
    """
    step = 1e-4

    def find_tension(q):
        with scope("force"):
            return springs @ q

    def advance(state, _):
        q, p = state
        with scope("drift"):
            q = q + step * p
        tension = find_tension(q)
        with scope("kick"):
            return (q, p + step * (pull - tension)), None

    def advance_and_measure(state, _):
        q, p = lax.scan(advance, state, length=1000)[0]
        with scope("energy"):
            return (q, p), 0.5 * (p @ p + q @ (springs @ q) + pull @ rest) - pull @ q

    with scope("start"):
        p = p + 0.5 * step * (pull - find_tension(q))
    return lax.scan(advance_and_measure, (q, p), length=10)[1]


def draw_gaussian_process(rng):
    """Times in years, whose square is 4e6 squared length scales, and a trend."""
    times = np.sort(rng.uniform(1958, 2020, size=40))
    trend = np.stack([np.ones(40), (times - 1990) / 30], axis=1)
    target = np.sin(times) + trend @ rng.normal(size=2) + 0.1 * rng.normal(size=40)
    places = np.stack([times, rng.normal(size=40)], axis=1)
    return {"scale": np.zeros(()), "noise": np.log(0.1), "trend": rng.normal(size=2)}, places, trend, target


def find_negative_likelihood(params, places, trend, target):
    """Differences of squares of years lose all digits of a distance in float32; the trend only has its rounding."""
    with scope("mean"):
        residual = target - trend @ params["trend"]
    with scope("kernel"):
        x = places / jnp.exp(params["scale"])
        squares = jnp.sum(x * x, axis=1)
        kernel = jnp.exp(-0.5 * (squares[:, None] + squares - 2 * x @ x.T))
    with scope("factor"):
        noise = jnp.exp(2 * params["noise"]) * jnp.eye(len(target), dtype=target.dtype)
        factor = jnp.linalg.cholesky(kernel + noise)
        white = solve_triangular(factor, residual, lower=True)
    with scope("likelihood"):
        return 0.5 * white @ white + jnp.sum(jnp.log(jnp.diag(factor)))


def draw_eigenproblem(rng):
    """A Hamiltonian with eight occupied levels below a gap, and a first guess of their states."""
    mix = draw_orthogonal(rng, 48, 48)
    levels = np.concatenate([rng.uniform(-2, -1, size=8), rng.uniform(0, 4, size=40)])
    return mix * levels @ mix.T, rng.normal(size=(48, 8))


def find_levels(hamiltonian, states):
    """Filters states by a Chebyshev polynomial and rotates them, six times.

    Levels depend on the error of states in the second order, and on that of their products with each other and with the
    Hamiltonian in the first.
    """

    def iterate(states, _):
        with scope("filter"):  # damps levels from 0 to 4
            old, new = states, hamiltonian @ states / 2 - states
            for _ in range(5):
                old, new = new, hamiltonian @ new - 2 * new - old
            states = new / jnp.max(jnp.abs(new), axis=0)  # of length 1, float32 would square some without an error
        for _ in range(2):
            with scope("orthogonalize"):
                factor = jnp.linalg.cholesky(states.T @ states)
                states = solve_triangular(factor, states.T, lower=True).T
        with scope("ritz"):
            levels, mix = jnp.linalg.eigh(states.T @ (hamiltonian @ states))
        with scope("rotate"):
            return states @ mix, levels

    return lax.scan(iterate, states, length=6)[1][-1]


def draw_likelihood(rng):
    """Data of a signal and a polynomial trend 2e3 times as large as the noise, at fifty live points."""
    t = np.linspace(-1, 1, 200)
    signal = np.stack([np.sin(3 * t), np.cos(3 * t), np.sin(5 * t), np.cos(5 * t)], axis=1)
    trend, noise, truth = np.vander(t, 6), rng.uniform(0.05, 0.15, size=200), 0.1 * rng.normal(size=4)
    data = signal @ truth + 2e2 * trend @ rng.choice([-1, 1], size=6) + noise * rng.normal(size=200)
    return truth + 0.03 * rng.normal(size=(50, 4)), signal, trend, noise, data


def find_likelihoods(points, signal, trend, noise, data):
    """Likelihoods of live points, with the trend marginalized: a small difference of two large sums of squares."""

    def find_likelihood(point):
        with scope("signal"):
            expected = signal @ point
        with scope("residual"):
            residual = data - expected
        with scope("marginalize"):
            white, columns = residual / noise, trend / noise[:, None]
            factor = jnp.linalg.cholesky(columns.T @ columns)
            fit = solve_triangular(factor, columns.T @ white, lower=True)
            return -0.5 * (white @ white - fit @ fit) - jnp.sum(jnp.log(jnp.diag(factor)))

    return jax.vmap(find_likelihood)(points)


PROGRAMS = {
    "least squares": Program(
        refine_least_squares,
        draw_least_squares,
        tolerance=1e-10,
        kept=("residual",),
        low=("gram", "factor", "correct"),
        needed=("residual", "update"),
    ),
    "newton": Program(
        solve_by_newton,
        draw_newton,
        tolerance=1e-10,
        kept=("residual",),
        low=("jacobian", "solve"),
        needed=("residual", "update"),
    ),
    "leapfrog": Program(
        integrate_by_leapfrog,
        draw_leapfrog,
        tolerance=5e-5,
        kept=("energy",),
        low=("force",),
        needed=("drift", "energy"),
    ),
    "gaussian process": Program(
        find_negative_likelihood,
        draw_gaussian_process,
        tolerance=2e-3,
        kept=("kernel",),
        low=("mean",),
        needed=("kernel",),
    ),
    "eigenproblem": Program(
        find_levels,
        draw_eigenproblem,
        tolerance=1e-10,
        kept=("orthogonalize", "ritz"),
        low=("filter", "rotate"),
        needed=("orthogonalize", "ritz"),
    ),
    "likelihood": Program(
        find_likelihoods,
        draw_likelihood,
        tolerance=4e-7,
        kept=("marginalize",),
        low=("signal",),
        needed=("residual", "marginalize"),
    ),
}
