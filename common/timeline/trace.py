"""A timeline as a file: Chrome's trace format, which https://ui.perfetto.dev opens, with one process per rank.

Thread 0 of a process has the rank's phases, the others its network. Times are microseconds. The timeline itself is in
the same file, under "timeline", so that `read_trace` returns what `write_trace` was given.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import InputError, reading
from common.paths import atomic_write
from common.timeline.boxes import Box, Step, Timeline, Wait, lanes

ADVICE = "rerun with --timeline to regenerate it"


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline to `path`."""
    events = [event for rank in range(timeline.world_size) for event in _events_of(timeline, rank)]
    with atomic_write(path) as file:
        json.dump({"timeline": asdict(timeline), "displayTimeUnit": "ms", "traceEvents": events}, file)


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
        steps = tuple(Step(**step) for step in about.pop("steps"))
        boxes = [Box(**{**box, "waits": tuple(Wait(**wait) for wait in box["waits"])}) for box in about.pop("boxes")]
        texts: dict[str, Any] = {name: tuple(about.pop(name)) for name in ("notes", "labels")}
        return Timeline(steps=steps, boxes=tuple(boxes), **texts, **about)
    except (KeyError, TypeError, AttributeError) as error:
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
    events += [_event(f"step {step.number}", rank, 0, step) for step in timeline.steps if step.rank == rank]
    for row, boxes in enumerate(rows):
        for box in boxes:
            events.append(_event(box.name, rank, row, box, {"bytes": box.bytes}))
            # A slice inside the phase, since the process is what waits.
            events += [_event(f"waiting for {timeline.label(wait.rank)}", rank, 0, wait) for wait in box.waits]
    return events


def _event(name: str, rank: int, row: int, part: Step | Box | Wait, arguments: Mapping[str, int] = {}) -> dict:
    start, end = round(part.start * 1e6, 3), round(part.end * 1e6, 3)
    times = {"ts": start, "dur": round(end - start, 3)}
    return {"ph": "X", "name": name, "pid": rank, "tid": row, **times, "args": dict(arguments)}
