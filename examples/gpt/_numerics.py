"""What a run measured of its tensors: on which steps, and the report and plots that end it.

Another compiled function measures them, which the host calls before the step and of which nothing else is kept. So a
run trains bit for bit as it does without, on the steps that are measured, too. Such a step takes the time of two.
"""

from jmp_policy.cli import UserError
from jmp_policy.numerics import StatsHistory
from jmp_policy.report import draw_document

from ._run_folder import RunConfig, RunFolder

TEXT, PAGE = "numerics.txt", "numerics.html"


def is_measured(step: int, every: int | None) -> bool:
    """Whether the tensors of a step are measured: those of the first one, and of each `every`-th.

    >>> [step for step in range(1, 8) if is_measured(step, 3)], is_measured(1, None)
    ([1, 3, 6], False)
    """
    return every is not None and (step == 1 or step % every == 0)


def read_history(folder: RunFolder) -> StatsHistory:
    """Reads all that a run measured.

    Raises:
      UserError: a line is damaged.
    """
    try:
        return StatsHistory.from_json_lines(folder.numerics.read_lines())
    except ValueError as error:
        raise UserError(f"{folder.numerics.path}: {error}") from error


def write_numerics(folder: RunFolder) -> None:
    """Writes the report and the plots of all that a run measured, if it measured anything."""
    history = read_history(folder)
    if not history.steps:
        return
    stats = history.merge()
    note = _describe(folder.read_config(), history)
    (folder.path / TEXT).write_text(f"{note}\n\n{stats}\n", encoding="utf-8")
    (folder.path / PAGE).write_text(draw_document(stats, "numerics of a run", note), encoding="utf-8")
    gradients = stats.select(lambda site: site.direction in ("backward", "result"))
    figures = {"exponents": gradients.plot(), "amax": history.plot_amax()}
    losing = [name for name in stats.layout.meter.formats if any(row.formats[name].underflow for row in stats)]
    figures |= {f"underflow-{name}": history.plot_underflow(name) for name in losing}
    for name, figure in figures.items():
        figure.savefig(folder.path / f"numerics-{name}.png", dpi=120)


def _describe(config: RunConfig, history: StatsHistory) -> str:
    steps = history.steps
    which = f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {min(steps)}"
    return (
        f"What the tensors of {which} looked like, trained with {config.policy.name}, and what other formats would do "
        "to them. The backward pass is measured as it runs, with the loss scale in its numbers. The results are the "
        "gradients, without it."
    )
