"""A timeline as one html file that needs no network: drag to move, turn the wheel to zoom, point at a box."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from common.paths import atomic_write
from common.timeline.boxes import Box, Timeline, Wait, lanes
from common.timeline.picture import COLOURS, GAP, NETWORK, NETWORK_ROW, PROCESS

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
    rectangles: list[dict] = []
    height = (PROCESS + NETWORK_ROW + GAP) * UNIT  # of the rows of a rank
    for rank in range(timeline.world_size):
        own = [box for box in timeline.boxes if box.rank == rank]
        top, process = rank * height, PROCESS * UNIT
        for box in own:
            if box.row == "process":
                colour = COLOURS.get(box.phase, "#FFFFFF")
                rectangles.append(_rectangle(box, top, process, _text(timeline, box), colour=colour))
        rows = lanes([box for box in own if box.row == "network"])
        for lane, boxes in enumerate(rows):
            place = top + process + lane * NETWORK_ROW * UNIT / len(rows), NETWORK_ROW * UNIT / len(rows)
            for box in boxes:
                text = _text(timeline, box)
                rectangles.append(_rectangle(box, *place, text, colour=NETWORK))
                # While the rank waits, nothing is on its way yet.
                rectangles += [_rectangle(wait, *place, text, colour="#FFFFFF") for wait in box.waits]
        for box in own:
            for wait in box.waits:  # drawn on the row of the process, which is what waits
                text = f"{timeline.label(rank)} waits for {timeline.label(wait.rank)}; {_text(timeline, box)}"
                rectangles.append(_rectangle(wait, top, process, text, hatched=True))
    return {
        "height": timeline.world_size * height,
        "rows": [
            {"label": timeline.label(rank), "y": rank * height + PROCESS / 2 * UNIT}
            for rank in range(timeline.world_size)
        ],
        "steps": [
            {"number": step.number, "x": step.start * 1e3, "w": (step.end - step.start) * 1e3}
            for step in timeline.steps
            if step.rank == 0
        ],
        "legend": _legend(timeline),
        "rectangles": rectangles,
    }


def _rectangle(part: Box | Wait, top: float, height: float, text: str, **look: Any) -> dict:
    return {"x": part.start * 1e3, "w": (part.end - part.start) * 1e3, "y": top, "h": height, "text": text, **look}


def _text(timeline: Timeline, box: Box) -> str:
    """Return what the page shows for a box: name, bytes, times, and for which rank its rank waited."""
    parts = [f"{timeline.label(box.rank)}: {box.name}"]
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
