"""A timeline as one html file that needs no network: drag to move, turn the wheel to zoom, point at a box."""

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path

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
    for rank in range(timeline.world_size):
        top = rank * (PROCESS + NETWORK_ROW + GAP) * UNIT
        own = [box for box in timeline.boxes if box.rank == rank]
        for box in own:
            if box.row == "process":
                rectangles.append(_rectangle(timeline, box, top, PROCESS * UNIT, COLOURS.get(box.phase, "#FFFFFF")))
        rows = lanes([box for box in own if box.row == "network"])
        height = NETWORK_ROW * UNIT / max(1, len(rows))
        for lane, boxes in enumerate(rows):
            above = top + PROCESS * UNIT + lane * height
            for box in boxes:
                rectangles.append(_rectangle(timeline, box, above, height, NETWORK))
                idle = [replace(box, start=wait.start, end=wait.end) for wait in box.waits]  # nothing is on its way yet
                white = [_rectangle(timeline, part, above, height, "#FFFFFF") for part in idle]
                rectangles += [{**part, "text": _text(timeline, box)} for part in white]
        waited = [(box, wait) for box in own for wait in box.waits]
        rectangles += [_hatched(timeline, box, wait, top) for box, wait in waited]
    return {
        "height": timeline.world_size * (PROCESS + NETWORK_ROW + GAP) * UNIT,
        "rows": [
            {"label": timeline.label(rank), "y": (rank * (PROCESS + NETWORK_ROW + GAP) + PROCESS / 2) * UNIT}
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


def _rectangle(timeline: Timeline, box: Box, top: float, height: float, colour: str) -> dict:
    return {
        "x": box.start * 1e3,
        "w": (box.end - box.start) * 1e3,
        "y": top,
        "h": height,
        "colour": colour,
        "text": _text(timeline, box),
    }


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


def _hatched(timeline: Timeline, box: Box, wait: Wait, top: float) -> dict:
    """A wait, on the row of the process: that is what waits."""
    words = f"{timeline.label(box.rank)} waits for {timeline.label(wait.rank)}; {_text(timeline, box)}"
    place = {"x": wait.start * 1e3, "w": (wait.end - wait.start) * 1e3, "y": top, "h": PROCESS * UNIT}
    return {**place, "hatched": True, "text": words}


def _legend(timeline: Timeline) -> list[dict]:
    names = {box.phase for box in timeline.boxes if box.row == "process"}
    shown = [{"name": name, "colour": colour} for name, colour in COLOURS.items() if name in names]
    if any(box.waits for box in timeline.boxes):
        shown.append({"name": "waiting", "colour": "hatched"})
    return shown
