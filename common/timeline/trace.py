"""A timeline as a file: Chrome's trace format, which https://ui.perfetto.dev opens, with one process per rank.

Thread 0 of a process has the rank's phases, the others its network. What the format has no place for, such as the
title, is under "timeline", so that `read_trace` returns what `write_trace` was given. Times are microseconds.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.errors import InputError, reading
from common.paths import atomic_write
from common.timeline.boxes import Box, Step, Timeline, Wait, lanes

ABOUT = [field.name for field in fields(Timeline) if field.name not in ("steps", "boxes")]
ADVICE = "rerun with --timeline to regenerate it"


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline to `path`."""
    about = {name: getattr(timeline, name) for name in ABOUT}
    events = [event for rank in range(timeline.world_size) for event in _events_of(timeline, rank)]
    with atomic_write(path) as file:
        json.dump({"timeline": about, "displayTimeUnit": "ms", "traceEvents": events}, file)


def read_trace(path: str | Path) -> Timeline:
    """Return the timeline in a file that `write_trace` wrote. Raises InputError, in one line, for any other file."""
    with reading(path, ADVICE):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        content = json.loads(text)
    except ValueError:
        raise InputError(f"{path}: expected a whole trace, but it is cut off or damaged; {ADVICE}") from None
    about = content.get("timeline") if isinstance(content, dict) else None
    if not isinstance(about, dict):
        raise InputError(f"{path}: expected a timeline, got another file; {ADVICE}")
    try:
        return _timeline(about, content["traceEvents"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}: expected a timeline, but an entry is missing or wrong ({error!r}); {ADVICE}"
        ) from None


def _events_of(timeline: Timeline, rank: int) -> list[dict]:
    """The events of one rank: first the names of its rows, then its steps, boxes and waits."""
    own = [box for box in timeline.boxes if box.rank == rank]
    rows = [[box for box in own if box.row == "process"], *lanes([box for box in own if box.row == "network"])]
    names = ["process", "network", *(f"network {lane}" for lane in range(2, len(rows)))]
    events = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": timeline.label(rank)}}]
    events += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}}
        for row, name in enumerate(names)
    ]
    for step in timeline.steps:
        if step.rank == rank:
            events.append(_event("step", f"step {step.number}", rank, 0, step.start, step.end, {"number": step.number}))
    for row, boxes in enumerate(rows):
        for box in boxes:
            waits = [[_us(wait.start), _us(wait.end), wait.rank] for wait in box.waits]
            events.append(
                _event(box.row, box.name, rank, row, box.start, box.end, {"bytes": box.bytes, "waits": waits})
            )
            # For Perfetto alone: a slice inside the phase, since the process is what waits.
            events += [
                _event("wait", f"waiting for {timeline.label(wait.rank)}", rank, 0, wait.start, wait.end, {})
                for wait in box.waits
            ]
    return events


def _event(category: str, name: str, rank: int, row: int, start: float, end: float, arguments: dict) -> dict:
    place = {"ph": "X", "cat": category, "name": name, "pid": rank, "tid": row}
    return {**place, "ts": _us(start), "dur": round(_us(end) - _us(start), 3), "args": arguments}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _timeline(about: dict, events: list[dict]) -> Timeline:
    steps, boxes = [], []
    for event in events:
        if event["ph"] != "X":
            continue
        rank, begin, end = event["pid"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        arguments = event["args"]
        if event["cat"] == "step":
            steps.append(Step(rank, arguments["number"], begin, end))
        elif event["cat"] in ("process", "network"):
            waits = tuple(Wait(first / 1e6, last / 1e6, waited) for first, last, waited in arguments["waits"])
            boxes.append(Box(rank, event["cat"], event["name"], begin, end, arguments["bytes"], waits))
    values: dict[str, Any] = {
        name: tuple(about[name]) if isinstance(about[name], list) else about[name] for name in ABOUT
    }
    return Timeline(steps=tuple(steps), boxes=tuple(boxes), **values)
