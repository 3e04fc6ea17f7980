"""The pictures of the home page: `python docs/_site/pictures.py` runs its program, and draws its output.

A test runs the program too, and compares the text of the picture of the nan.
"""

import contextlib
import html
import io
import linecache
import pathlib
import re
import textwrap

import matplotlib.pyplot as plt
import numpy as np

DOCS = pathlib.Path(__file__).parent.parent

START = "## A step that overflows is skipped"
"""Before it the page shows a model of another library."""

COLUMNS = 62  # a phone shows no more letters that can be read
LETTER, LINE, MARGIN = 8.5, 20, 16
STYLE = (
    "text{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:14px;fill:#e6e6f0;white-space:pre}"
    "rect{fill:#24262e}"
)


def run_home_page() -> tuple[dict[str, object], str]:
    """Runs the home page from its second section on; returns its names, and its output."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text.partition(START)[2], re.DOTALL | re.MULTILINE)
    code = "\n".join(blocks)
    linecache.cache["train.py"] = len(code), None, code.splitlines(keepends=True), "train.py"
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "train.py", "exec"), names)
    return names, printed.getvalue().strip()


def draw_console(command: str, printed: str) -> str:
    """Returns an SVG of a dark console with a command and its output, wrapped at `COLUMNS`.

    >>> re.findall("<text.*?>(.*?)</text>", draw_console("print(1 < 2)", "True"))
    ['&gt;&gt;&gt; print(1 &lt; 2)', 'True']
    """
    lines = [f">>> {command}", *textwrap.wrap(printed, COLUMNS, break_on_hyphens=False)]
    width, height = round(COLUMNS * LETTER + 2 * MARGIN), len(lines) * LINE + 2 * MARGIN
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * (i + 0.75):g}">{html.escape(line, quote=False)}</text>'
        for i, line in enumerate(lines)
    ]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{html.escape(printed, quote=False)}</title>",
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" rx="6"/>',
        *rows,
        "</svg>\n",
    ])  # fmt: skip


def plot_skips(history: list[tuple[float, float, bool]], path: pathlib.Path) -> None:
    """Plots the losses and loss scales of a training, with a cross at each step that was skipped."""
    losses, scales, taken = map(np.asarray, zip(*history, strict=True))
    (skipped,) = np.nonzero(~taken)
    blank = int(skipped[np.isnan(losses[skipped])][0])
    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(6.4, 4.2), layout="constrained")
    top.plot(losses, color="#3f51b5")
    top.axvline(blank, color="#d55e00", linewidth=1, linestyle=":")
    top.annotate("a blank image:\nthe loss is nan", (blank, np.nanmax(losses)), (-6, 0), textcoords="offset points",
                 horizontalalignment="right", verticalalignment="top", color="#d55e00")  # fmt: skip
    top.set_ylabel("loss")
    bottom.step(range(len(scales)), scales, where="mid", color="#00916e")
    bottom.plot(skipped, scales[skipped], "x", color="#d55e00", label=f"skipped step ({len(skipped)})")
    bottom.set_yscale("log", base=2)
    bottom.set(xlabel="step", ylabel="loss scale")
    bottom.legend(loc="lower right")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=125)
    plt.close(figure)


if __name__ == "__main__":
    names, printed = run_home_page()
    plot_skips(names["history"], DOCS / "images" / "skipped.png")
    (DOCS / "images" / "nan.svg").write_text(draw_console("print(find.verdict(*skipped))", printed), encoding="utf-8")
