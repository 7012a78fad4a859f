"""Draws a timeline as a picture for a report: readable in grey and at half a page's width.

Two rows per rank: what its process does, and below it, thinner, what its network does. Waiting is hatched in both.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from common.figures import draw_into_files
from common.timeline.boxes import Box, Timeline, Wait, lanes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From white to black, so that phases also differ in grey. Blue and orange differ with every common colour blindness.
COLOURS = {
    "data": "#FFFFFF",
    "forward": "#BBDDF2",
    "communication": "#F0A830",
    "averaging": "#7A9E7E",
    "backward": "#2B7BB9",
    "optimizer": "#303030",
    "pipeline": "#8F8F8F",  # never in one picture with averaging, which is as dark in grey
}
NETWORK, WHITE, HATCHED = "#F0A830", "#FFFFFF", "hatched"
HATCH = "////"
DASHES = (0, (2, 2))  # of the line at which a step begins
WIDTH = 6.4  # inches; at half of that, letters of FONT points are still 6.5 points high
FONT = 13
UNIT = 0.28  # inches: the height of a process's row
PROCESS, NETWORK_ROW, GAP = 1.0, 0.5, 0.35  # heights of the rows of a rank
RANK = PROCESS + NETWORK_ROW + GAP
LETTER = 0.02  # the least share of the picture's width in which a letter fits
EDGE = 0.004  # and of a box with an edge


class Rectangle(NamedTuple):
    """What is drawn of a box or of a wait, here and in page.py. top, height: the row of a process is 1 high."""

    part: Box | Wait
    box: Box  # the part, or the one that waits
    top: float
    height: float
    colour: str  # or "hatched"


def rectangles(timeline: Timeline, rank: int) -> list[Rectangle]:
    """Return what is drawn of a rank; later ones cover earlier ones."""
    own, top = [box for box in timeline.boxes if box.rank == rank], rank * RANK
    drawn = [Rectangle(box, box, top, PROCESS, COLOURS.get(box.phase, WHITE)) for box in own if box.row == "process"]
    rows = lanes([box for box in own if box.row == "network"])
    for lane, boxes in enumerate(rows):
        place = top + PROCESS + lane * NETWORK_ROW / len(rows), NETWORK_ROW / len(rows)
        drawn += [Rectangle(box, box, *place, NETWORK) for box in boxes]
        # While the rank waits, nothing is on its way yet.
        drawn += [Rectangle(wait, box, *place, HATCHED) for box in boxes for wait in box.waits]
    return drawn + [Rectangle(wait, box, top, PROCESS, HATCHED) for box in own for wait in box.waits]


def draw(timeline: Timeline, path: str | Path, seconds: float = 0.0, unit: float = UNIT) -> None:
    """Write the picture of a timeline to `path`. The thin row below each rank is its network.

    seconds: the least length of the time axis, for pictures that are compared. unit: the height of a process's row in
    inches; above UNIT, the boxes on the network rows are named, too.
    """
    draw_below_each_other([timeline], path, seconds, unit)


def draw_below_each_other(
    timelines: Sequence[Timeline], path: str | Path, seconds: float = 0.0, unit: float = UNIT
) -> None:
    """Write one picture of several timelines to `path`, all on the same scale: what is longer takes more time."""
    draw_into_files()
    from matplotlib import rc_context  # here: it takes half a second to load
    from matplotlib.figure import Figure

    rows = [0.5 + timeline.world_size * RANK for timeline in timelines]
    notes = sum(len(timeline.notes) for timeline in timelines)
    with rc_context({"font.size": FONT, "hatch.linewidth": 0.8}):
        height = 1.2 + unit * sum(rows) + 0.75 * len(timelines) + 0.25 * notes
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        all_axes = figure.subplots(len(timelines), squeeze=False, sharex=True, height_ratios=rows)[:, 0]
        limits = [_limits(timeline) for timeline in timelines]
        longest = max(seconds, *(end - start for start, end in limits))
        for axes, timeline, (start, _) in zip(all_axes, timelines, limits, strict=True):
            axes.set_xlim(start * 1e3, (start + longest) * 1e3)
            _draw_steps(axes, timeline)
            for rank in range(timeline.world_size):
                _draw_rank(axes, timeline, rank, named=unit > UNIT)
            _label(axes, timeline, max(timelines, key=lambda one: one.clock_error) if axes is all_axes[-1] else None)
        figure.legend(handles=_legend(timelines), loc="outside lower center", ncols=4, frameon=False,
                      fontsize=FONT - 2, handlelength=1.4, columnspacing=1.0, handletextpad=0.5)  # fmt: skip
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _draw_steps(axes: "Axes", timeline: Timeline) -> None:
    steps = [step for step in timeline.steps if step.rank == 0]
    for step in steps:
        axes.axvline(step.start * 1e3, color="black", linewidth=0.8, linestyle=DASHES, zorder=0)
        middle = (step.start + step.end) / 2 * 1e3
        axes.text(middle, -0.25, f"step {step.number}", ha="center", va="bottom", fontsize=FONT - 2)


def _draw_rank(axes: "Axes", timeline: Timeline, rank: int, named: bool) -> None:
    """Fill the rectangles; only wide ones have an edge, or many narrow ones would be black."""
    shown_ms = axes.get_xlim()[1] - axes.get_xlim()[0]
    alike: dict[tuple[float, float, str, float], list[tuple[float, float]]] = defaultdict(list)
    for part, _, top, height, colour in rectangles(timeline, rank):
        length = 1e3 * (part.end - part.start)
        edge = 0.5 if length > EDGE * shown_ms and colour != HATCHED else 0.0
        alike[top, height, colour, edge].append((1e3 * part.start, length))
    for (top, height, colour, edge), spans in alike.items():
        hatch, face = (HATCH, "white") if colour == HATCHED else (None, colour)
        axes.broken_barh(spans, (top, height), edgecolor="black", linewidth=edge, facecolor=face, hatch=hatch)
    for box in (box for box in timeline.boxes if (box.rank, box.row) == (rank, "process")):
        if 1e3 * (box.end - box.start) > LETTER * shown_ms and box.phase != "communication":
            _letter(axes, box, rank * RANK + PROCESS / 2)
    for part, box, top, height, _ in rectangles(timeline, rank) if named else ():
        if box.row == "network" and part is box and 1e3 * (box.end - box.start) > LETTER * shown_ms:
            middle = (box.start + box.end) / 2 * 1e3
            under = {"facecolor": NETWORK, "edgecolor": "none", "pad": 0.5}
            text = axes.text(middle, top + height / 2, box.name, fontsize=FONT - 5, clip_on=True, bbox=under)
            text.set(ha="center", va="center")


def _letter(axes: "Axes", box: Box, height: float) -> None:
    """Write F, B, A, D or O into a box, in a pipeline with the micro-batch."""
    text = box.phase[0].upper() + box.name.removeprefix(box.phase).strip()
    colour = "white" if box.phase in ("backward", "optimizer") else "black"
    middle = (box.start + box.end) / 2 * 1e3
    axes.text(middle, height, text, ha="center", va="center", color=colour, fontsize=FONT - 3, clip_on=True)


def _limits(timeline: Timeline) -> tuple[float, float]:
    """Return the times at which the picture begins and ends, in seconds."""
    ends = [step.end for step in timeline.steps] + [box.end for box in timeline.boxes]
    return min(step.start for step in timeline.steps), max(ends)


def _label(axes: "Axes", timeline: Timeline, least_exact: Timeline | None) -> None:
    """Name the rows; below the last axes, say also how exact the clocks are."""
    axes.set_ylim(timeline.world_size * RANK - GAP / 2, -0.2)
    middles = [rank * RANK + PROCESS / 2 for rank in range(timeline.world_size)]
    axes.set_yticks(middles, [timeline.label(rank) for rank in range(timeline.world_size)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(timeline.title, fontsize=FONT, pad=22)
    axes.tick_params(labelbottom=least_exact is not None)
    lines = [*(["time (ms)", least_exact.clock] if least_exact else []), *timeline.notes]
    axes.set_xlabel("\n".join(lines), fontsize=FONT - 2)


def _legend(timelines: Sequence[Timeline]) -> list:
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    boxes = [box for timeline in timelines for box in timeline.boxes]
    names = {"communication" if box.row == "network" else box.phase for box in boxes}
    shown = [(name, colour) for name, colour in COLOURS.items() if name in names]
    handles: list[Artist] = [Patch(facecolor=colour, edgecolor="black", label=name) for name, colour in shown]
    if any(box.waits for box in boxes):
        handles.append(Patch(facecolor="white", edgecolor="black", hatch=HATCH, label="waiting"))
    if "communication" in names:
        handles.append(Line2D([], [], color=NETWORK, linewidth=3, label="thin row: its network"))
    handles.append(Line2D([], [], color="black", linewidth=0.8, linestyle=DASHES, label="a step begins"))
    return handles
