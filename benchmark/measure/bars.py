"""A figure that compares many strategies: horizontal bars with their intervals, coloured by group."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from common.figures import COLOURS, HATCHES, figure

GAP = 0.6  # between two names, in bars


@dataclass(frozen=True)
class Bar:
    """Bars that follow each other with the same name share its label. group: what its colour says.

    value: None if it was not measured. low, high: the ends of its interval, if there is one.
    """

    name: str
    group: str
    value: float | None
    low: float | None = None
    high: float | None = None


def draw_bars(
    path: Path, bars: Sequence[Bar], label: str, title: str, groups: Sequence[str] = (), also: str = ""
) -> None:
    """Draw the bars from top to bottom; what was not measured is said, not drawn as 0.

    groups: all that there can be, where each shall have its colour in every figure. also: another suffix, such as .pdf.
    """
    groups = groups or list(dict.fromkeys(bar.group for bar in bars))
    names = [(name, list(same)) for name, same in groupby(bars, lambda bar: bar.name)]
    height = 1.2 + 0.22 * (len(bars) + GAP * len(names))
    width = 6.0 if len({bar.group for bar in bars}) == 1 else 7.2  # the legend stands beside the bars
    with figure(path, width, height, also) as axes:
        place, ticks, labelled = 0.0, [], set[str]()
        for _, same in names:
            ticks.append(place + (len(same) - 1) / 2)
            for bar in same:
                if bar.value is None:
                    axes.text(0, place, " not measured", va="center", fontsize=8)
                else:
                    style = groups.index(bar.group) % len(COLOURS)
                    ends = bar.low is not None and bar.high is not None
                    errors = [[max(0.0, bar.value - bar.low)], [max(0.0, bar.high - bar.value)]] if ends else None  # type: ignore[operator]
                    axes.barh(
                        place, bar.value, 0.9, xerr=errors, capsize=2, color=COLOURS[style], hatch=HATCHES[style],
                        edgecolor="white", label=None if bar.group in labelled else bar.group,
                    )  # fmt: skip
                    labelled.add(bar.group)
                    end = (bar.high or bar.value, place)
                    axes.annotate(f"{bar.value:,.3g}", end, (4, -3), textcoords="offset points", fontsize=8)
                place += 1
            place += GAP
        axes.set_yticks(ticks, [name for name, _ in names])
        axes.set_ylim(place - GAP / 2, -0.5 - GAP / 2)
        axes.margins(x=0.15)
        axes.set_xlabel(label)
        axes.set_title(title)
        if len(labelled) > 1:
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
