"""The picture of a run's loss: loss.png out of metrics.jsonl. No display needed, no other metrics drawn."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from heavylift.files import replacing
from heavylift.train.metrics import RunMetrics, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

# shorter runs are read well without a second line
_SMOOTH_FROM_STEPS = 50


def plot_loss(metrics_path: Path | str, png_path: Path | str) -> None:
    """Draw the training loss (in long runs with a smoothed line) and the evaluations; replaces `png_path`.

    Steps whose loss is not finite leave a gap. A run without any step gives an empty picture. Raises UserError for an
    unreadable metrics file, OSError for a picture that cannot be written.
    """
    metrics = read_metrics(metrics_path)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # a cache of fonts that cannot be kept is no news
    # the figure without pyplot: no global state, and no window system is looked for
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    _draw(figure.add_subplot(), metrics)
    with replacing(Path(png_path)) as part, open(part, "wb") as file:
        canvas.print_png(file)


def _draw(axes: Axes, metrics: RunMetrics) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = np.array([record.step for record in metrics.steps], dtype=np.int64)
    losses = np.array([record.loss for record in metrics.steps], dtype=np.float64)
    long = len(steps) >= _SMOOTH_FROM_STEPS
    # a marker on each step keeps a single point, and points between two gaps, visible; in long runs they would blur
    marker = None if long else "."
    if len(steps):
        axes.plot(steps, losses, color="tab:blue", alpha=0.35 if long else 1.0, marker=marker, label="train")
    if long:
        window = max(5, len(steps) // 50) | 1
        axes.plot(steps, smoothed(losses, window), color="tab:blue", label=f"train, mean of {window} steps")
    if metrics.evals:
        eval_steps = [record.step for record in metrics.evals]
        eval_losses = [record.eval_loss for record in metrics.evals]
        axes.plot(eval_steps, eval_losses, color="tab:orange", marker="o", label="eval")
    axes.set(xlabel="step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    if len(steps) or metrics.evals:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "no steps", transform=axes.transAxes, ha="center", va="center")


def smoothed(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean over the `window` (odd) values around each of `values` [n], float64 [n].

    Values that are not finite do not count; towards the ends the window gets shorter on one side. NaN where no value
    in the window is finite.
    """
    assert window % 2 == 1, window
    finite = np.isfinite(values)
    # prefix sums: one pass, whatever the window
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    middle = np.arange(len(values))
    low = np.maximum(middle - window // 2, 0)
    high = np.minimum(middle + window // 2 + 1, len(values))
    num = counts[high] - counts[low]
    return np.where(num > 0, (sums[high] - sums[low]) / np.maximum(num, 1), np.nan)
