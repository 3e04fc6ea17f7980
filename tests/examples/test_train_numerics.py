"""`train --numerics N`: what is measured of a run, beside its metrics; the run itself stays as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt.model import GPTConfig, TrainerConfig, make_trainer
from jmp_policy.numerics import StatsHistory

pytestmark = pytest.mark.usefixtures("standard_promotion")

REPORT = {"numerics-amax.png", "numerics-exponents.png", "numerics.html", "numerics.jsonl", "numerics.txt"}


def read_history(path) -> StatsHistory:
    with (path / "numerics.jsonl").open() as file:
        return StatsHistory.from_json_lines(file)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("table")
def test_the_first_and_every_nth_step_is_measured_and_a_report_ends_the_run(folder):
    tiny.run(folder, numerics=4, steps=9)
    path = folder / "run"
    history = read_history(path)
    assert history.steps == (1, 4, 8)
    assert {file.name for file in path.glob("numerics*")} == REPORT
    text = (path / "numerics.txt").read_text(encoding="utf-8")
    assert text.startswith("Tensors of 3 steps, trained with params=float32,compute=float32,output=float32.")
    assert str(history.merge()) in text
    page = (path / "numerics.html").read_text(encoding="utf-8")
    assert "<title>numerics of a run</title>" in page
    assert "<p>Tensors of 3 steps, trained with " in page


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_run_that_is_measured_trains_as_one_that_is_not_and_goes_on_in_its_file(folder):
    tiny.run(folder, steps=4)
    assert not list((folder / "run").glob("numerics*"))
    tiny.run(folder, steps=2, numerics=2, out=folder / "measured")
    with (folder / "measured" / "numerics.jsonl").open("a") as log:  # as if it had got further, and been killed
        log.write('{"step": 4, "rows": []}\n{"step": 5, "ro')
    tiny.run(folder, steps=4, out=folder / "measured", resume=True)  # every second step, as it was begun
    assert read_history(folder / "measured").steps == (1, 2, 4)
    losses = [
        [record for record in tiny.read_records(folder / name) if "loss" in record] for name in ("run", "measured")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_gpt_is_measured_with_true_gradients_and_its_state_stays(api):
    model = GPTConfig(width=8, depth=1, heads=1, context=8)
    config = TrainerConfig(jmp.get_policy("float32"), model, loss_scale=jmp.StaticLossScale(2.0**10))
    trainer = make_trainer(api, config)
    windows = np.random.default_rng(0).integers(0, 256, (4, 9), dtype=np.uint8)
    before = jax.tree.map(jnp.copy, trainer.state)
    rows = trainer.observe(windows).rows()
    assert all(map(jnp.array_equal, jax.tree.leaves(before), jax.tree.leaves(trainer.state)))
    block = "blocks/0" if api == "nnx" else "blocks_0"
    paths = {f"{block}/attention/qkv", f"{block}/expand", f"{block}/contract", "embed"}
    for direction in ("forward", "backward"):
        assert {row.path for row in rows if row.direction == direction} >= paths
    grads = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.grad(trainer.loss_fn)(trainer.params, windows))]
    results = [row for row in rows if row.direction == "result"]
    # Other fusions: the last bits differ, and so a number may fall to the other side of a bound.
    for row, grad in zip(results, grads, strict=True):
        assert row.amax == pytest.approx(float(np.abs(grad).max()), rel=1e-5)
        lost = np.mean((grad.astype(jnp.float8_e4m3fn) == 0) & (grad != 0))
        assert row.formats["float8_e4m3fn"].underflow == pytest.approx(float(lost), abs=2 / grad.size)
