"""A figure that compares many strategies: a horizontal bar for each, in order, with its interval."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmark.strategies import STRATEGIES
from common.figures import COLOURS, figure

FAMILIES = ("PyTorch", "DeepSpeed", "lessons of beyond/", "other libraries")  # each has its colour in every figure


class Bar(NamedTuple):
    """value: None if it was not measured; low, high: the ends of its interval, if there is one."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None


def draw_ranking(path: Path, bars: Sequence[Bar], label: str, title: str) -> None:
    """Draw the bars, the smallest value first, coloured by family; what was not measured is said, not drawn as 0."""
    known = sorted((bar for bar in bars if bar.value is not None), key=lambda bar: bar.value or 0.0)
    rows = [*known, *(bar for bar in bars if bar.value is None)]
    families = [name for name in FAMILIES if name in {family(bar.name) for bar in rows}]
    with figure(path, 6.0 + (1.2 if len(families) > 1 else 0), 1.2 + 0.28 * len(rows)) as axes:
        for place, bar in enumerate(rows):
            if bar.value is None:
                axes.text(0, place, " not measured", va="center", fontsize=8)
                continue
            errors = None
            if bar.low is not None and bar.high is not None:
                errors = [[max(0.0, bar.value - bar.low)], [max(0.0, bar.high - bar.value)]]
            colour = COLOURS[FAMILIES.index(family(bar.name))]
            axes.barh(place, bar.value, xerr=errors, capsize=2, color=colour, edgecolor="black", linewidth=0.5)
            axes.annotate(f"{bar.value:,.3g}", (bar.high or bar.value, place), (4, -3), textcoords="offset points",
                          fontsize=8)  # fmt: skip
        axes.set_yticks(range(len(rows)), [bar.name for bar in rows])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel(label)
        axes.set_title(title)
        if len(families) > 1:
            handles = [axes.barh(0, 0, color=COLOURS[FAMILIES.index(name)]) for name in families]
            axes.legend(handles, families, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def family(name: str) -> str:
    """Return whose strategy it is, for the colours."""
    row = STRATEGIES.get(name.split()[0])
    if row is not None and row.zero:
        return "DeepSpeed"
    if row is not None and row.engine.startswith(("horovod", "megatron")):
        return "other libraries"
    return "lessons of beyond/" if name.startswith("own_") else "PyTorch"
