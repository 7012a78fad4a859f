"""A timeline as one html file that needs no network: drag to move, turn the wheel to zoom, point at a box."""

import json
import re
from html import escape
from pathlib import Path

from common.paths import atomic_write
from common.timeline.boxes import Box, Step, Timeline, Wait
from common.timeline.picture import COLOURS, HATCHED, PROCESS, RANK, rectangles

TEMPLATE = Path(__file__).with_name("page.html")
UNIT = 30  # pixels: the height of the row of a process


def write_page(timeline: Timeline, path: str | Path) -> None:
    """Write the page of a timeline to `path`."""
    # In a script element, "</" would end it, whatever it is part of.
    data = json.dumps(page_data(timeline)).replace("</", "<\\/")
    notes = "<br>".join(escape(line) for line in (timeline.clock, *timeline.notes))
    values = {"title": escape(timeline.title), "notes": notes, "data": data}
    # In one pass: a title may contain "@data@".
    text = re.sub("@(title|notes|data)@", lambda match: values[match[1]], TEMPLATE.read_text(encoding="utf-8"))
    with atomic_write(path) as file:
        file.write(text)


def page_data(timeline: Timeline) -> dict:
    """Return what the page draws: rectangles in milliseconds and pixels, each with the text that belongs to it."""
    ranks = range(timeline.world_size)
    return {
        "height": timeline.world_size * RANK * UNIT,
        "rows": [{"label": timeline.label(rank), "y": (rank * RANK + PROCESS / 2) * UNIT} for rank in ranks],
        "steps": [{"number": step.number, **_span(step)} for step in timeline.steps if step.rank == 0],
        "legend": _legend(timeline),
        "rectangles": [
            {**_span(part), "y": top * UNIT, "h": height * UNIT, "colour": colour, "hatched": colour == HATCHED,
             "text": _text(timeline, box, part.rank if colour == HATCHED else None)}
            for rank in ranks for part, box, top, height, colour in rectangles(timeline, rank)
        ],
    }  # fmt: skip


def _span(part: Box | Step | Wait) -> dict[str, float]:
    return {"x": part.start * 1e3, "w": (part.end - part.start) * 1e3}


def _text(timeline: Timeline, box: Box, awaited: int | None) -> str:
    """Return what the page shows for a box: name, bytes, times, and for which rank its rank waited or waits here."""
    label = timeline.label(box.rank)
    waits = "" if awaited is None else f"{label} waits for {timeline.label(awaited)}; "
    parts = [f"{waits}{label}: {box.name}"]
    if box.row == "network":
        parts.append(f"{box.bytes:,} bytes")
    parts.append(f"{(box.end - box.start) * 1e3:.3f} ms")
    waited: dict[int, float] = {}
    for wait in box.waits:
        waited[wait.rank] = waited.get(wait.rank, 0.0) + wait.end - wait.start
    parts += [f"waited {seconds * 1e3:.3f} ms for {timeline.label(rank)}" for rank, seconds in waited.items()]
    return ", ".join(parts)


def _legend(timeline: Timeline) -> list[dict]:
    names = {box.phase for box in timeline.boxes if box.row == "process"}
    shown = [{"name": name, "colour": colour} for name, colour in COLOURS.items() if name in names]
    if any(box.waits for box in timeline.boxes):
        shown.append({"name": "waiting", "colour": "hatched"})
    return shown
