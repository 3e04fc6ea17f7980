"""Whether an installed package works, with nothing but what it needs: `python -P -W error tests/smoke.py`.

Not a test of `pytest`: it runs where the wheel or the source distribution has been installed alone, and refuses to run
on a checkout. With `-P` the modules beside this file are out of the way. The first failure ends it with status 1.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

EXTRA = "matplotlib"
"""A package of the extra `demo`."""


def main() -> None:
    """Runs every check, and prints what each took."""
    for check in (find_installed, import_rooms, train_linen, train_nnx, run_commands, refuse_to_plot):
        start = time.perf_counter()
        result = check()
        print(f"{check.__name__.replace('_', ' ')}: {result} ({time.perf_counter() - start:.1f} s)", flush=True)


def find_installed() -> str:
    """The version that the package says and the one that was installed are one, and it is no checkout."""
    import jmp_policy as jmp

    installed = importlib.metadata.version("jmp-policy")
    assert jmp.__version__ == installed, f"__version__ is {jmp.__version__}, but {installed} is installed"
    folder = Path(jmp.__file__).resolve()
    sites = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")]
    assert any(folder.is_relative_to(site) for site in sites), f"{folder} is not an installed package"
    assert (folder.parent / "py.typed").exists(), "the types are not marked as such"
    return f"jmp_policy {installed}"


def import_rooms() -> str:
    """Every module can be imported, private ones too, without an extra."""
    import jmp_policy as jmp

    names = [module.name for module in pkgutil.walk_packages(jmp.__path__, "jmp_policy.")]
    names = [name for name in names if not name.endswith("__main__")]  # runs the command
    for name in names:
        importlib.import_module(name)
    return f"{len(names)} modules"


def train_linen() -> str:
    """A step of linen in float16 lowers the loss, and an overflow is skipped."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn

    import jmp_policy as jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    model = jmp.with_policy(nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)]), policy)
    tx = jmp.optim.loss_scaled(optax.adam(0.01), policy.loss_scale())
    labels = jnp.arange(8) % 4

    @jax.jit
    def step(params, opt_state, x):
        def loss_fn(params):
            logits = model.apply({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jmp.value_and_grad(loss_fn, loss_scale=opt_state)(params)
        params, opt_state = jmp.optim.step(tx, grads, opt_state, params)
        return params, opt_state, loss

    x = jax.random.normal(jax.random.key(0), (8, 6))
    params = model.init(jax.random.key(1), x)["params"]
    opt_state, losses = tx.init(params), []
    for _ in range(20):
        params, opt_state, loss = step(params, opt_state, x)
        losses.append(float(loss))
    assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    before = params
    params, opt_state, _ = step(params, opt_state, x * jnp.inf)
    assert not jmp.metrics(opt_state)["grads_finite"], "an overflow was not seen"
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before, params)), "an overflow was not skipped"
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}, and one step skipped"


def train_nnx() -> str:
    """A step of nnx in bfloat16 lowers the loss."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import jmp_policy as jmp

    rngs = nnx.Rngs(0)
    net = nnx.Sequential(nnx.Linear(6, 16, rngs=rngs), nnx.relu, nnx.Linear(16, 4, rngs=rngs))
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    net = jmp.with_policy(net, policy)
    tx = jmp.optim.loss_scaled(optax.adam(0.01), policy.loss_scale())
    optimizer = jmp.nnx.Optimizer(net, tx, wrt=nnx.Param)
    x, labels = jax.random.normal(jax.random.key(0), (8, 6)), jnp.arange(8) % 4

    @nnx.jit
    def step(net, optimizer, x):
        def loss_fn(net):
            return optax.softmax_cross_entropy_with_integer_labels(net(x), labels).mean()

        loss, grads = jmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)(net)
        optimizer.update(net, grads)
        return loss

    losses = [float(step(net, optimizer, x)) for _ in range(20)]
    assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}"


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `jmp-policy` as installed, in an empty folder, where warnings are errors."""
    command = shutil.which("jmp-policy", path=sysconfig.get_path("scripts"))
    assert command is not None, f"there is no jmp-policy in {sysconfig.get_path('scripts')}"
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )


def run_commands() -> str:
    """What needs no extra runs."""
    commands = [("--help",), ("--version",), ("audit", "os:getcwd"), ("doctor",)]
    for arguments in commands:
        done = run_command(*arguments)
        assert done.returncode == 0, f"jmp-policy {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
        assert done.stdout, f"jmp-policy {' '.join(arguments)} printed nothing"
    return ", ".join(" ".join(arguments) for arguments in commands)


def refuse_to_plot() -> str:
    """What needs an extra names it in one line, where it is missing."""
    if importlib.util.find_spec(EXTRA):
        return "not asked, since the extra is installed"
    done = run_command("numerics", "os:getcwd", "--plot", "plot.png")
    assert done.returncode == 2, f"a plot without the extra ended with {done.returncode}"
    assert "demo" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip()


if __name__ == "__main__":
    main()
