"""One style for all plots: readable in print, in grey and for colour-blind readers, with units on the axes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours: distinguishable with every common kind of colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")  # and without any colour


def draw_into_files() -> None:
    """Choose the backend that writes files; call this before the first import of matplotlib.

    There may be no screen, and a backend that a notebook names in MPLBACKEND makes that import fail elsewhere.
    """
    os.environ["MPLBACKEND"] = "agg"


@contextmanager
def figure(path: str | Path, width: float = 6.0, height: float = 3.6, also: str = "") -> "Iterator[Axes]":
    """Yield axes to draw on, and save the figure to `path` at the end. Sizes are in inches.

    also: another suffix, such as .pdf; then a file of that kind is saved beside it.
    """
    draw_into_files()
    import matplotlib.pyplot as plt  # here: it takes half a second to load, and many commands end without a figure

    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        fig, axes = plt.subplots(figsize=(width, height), layout="constrained")
        try:
            yield axes
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            for suffix in filter(None, (Path(path).suffix, also)):
                fig.savefig(Path(path).with_suffix(suffix), dpi=150)
        finally:
            plt.close(fig)


def bars(
    path: str | Path,
    names: Sequence[str],
    values: Sequence[float],
    *,
    label: str,
    title: str,
    errors: Sequence[float] | None = None,
) -> None:
    """Draw one bar per name, with its value above it. `label`: the measured quantity, with its unit."""
    with figure(path) as axes:
        drawn = axes.bar(names, values, yerr=errors, capsize=4, color=COLOURS[: len(names)], edgecolor="black")
        for bar, hatch in zip(drawn, HATCHES * len(names), strict=False):
            bar.set_hatch(hatch)
        axes.bar_label(drawn, fmt=lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}", padding=3)
        axes.set_ylabel(label)
        axes.set_title(title)
        axes.margins(y=0.15)
