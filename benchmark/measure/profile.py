"""A few steps under torch.profiler: communication, and its exposed part.

    main thread   [ forward ][ backward          ]....[ optimizer ]
    gloo               [=== all_reduce ===] [== all_reduce ==]        total: both; exposed: the dots, where nothing
                                                                      was computed meanwhile

The traced steps are not timed: what the profiler costs stays out of the figures. Their shares are applied to the timed
steps.

A worker in an all_reduce waits until the last worker has come; from then on it communicates. Clocks of several machines
differ, so durations say when that was: the last one's call is the shortest, and what others take longer is waiting.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from common.timeline.spans import Span, duration, merged, without

COMMUNICATION = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
OF_EQUALS = ("allreduce", "allgather", "alltoall", "reducescatter", "horovod")  # none of them ends before all have come


class Tracer:
    """Starts with the first traced step; `phase` marks the phases in the trace."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profile = profile(activities=activities)
        self.steps = 0

    def start(self) -> None:
        self._profile.start()

    def stop(self, keep: Path | None) -> dict[str, Any]:
        """The figures per traced step; the trace itself goes to `keep`."""
        return read_trace(self.events(keep), self.steps, self.on_gpu)

    def events(self, keep: Path | None = None) -> list[dict]:
        """Stop profiling and return all events since the start."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = keep or Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            events: list[dict] = json.loads(file.read_text())["traceEvents"]
            return events


def mark(name: str) -> record_function:
    return record_function(f"phase:{name}")


def inside(events: list[dict], name: str) -> list[dict]:
    """The events of a trace in the time that a phase of this name, see mark(), took."""
    begin, end = next(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("name") == f"phase:{name}" and event.get("cat") == "user_annotation"
    )
    return [event for event in events if event.get("ph") == "X" and begin < float(event["ts"]) < end]


def read_trace(events: Iterable[dict], steps: int, on_gpu: bool = False) -> dict[str, Any]:
    """Communication per step (ms), and its exposed share of each phase; exposed spans and calls in microseconds.

    On a GPU, kernels count, since a call of NCCL ends when it is queued. None where the profiler saw none.
    """
    calls = list[tuple[Span, str]]()
    spans, phases = defaultdict[str, list[Span]](list), defaultdict[str, list[Span]](list)  # in microseconds
    for event in events:
        name = str(event.get("name", ""))
        if event.get("ph") == "X":
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            if name.startswith("phase:") and event.get("cat") == "user_annotation":
                phases[name.removeprefix("phase:")].append(span)
                continue
            if name.startswith(COMMUNICATION):
                if not on_gpu or event.get("cat") == "kernel" or name.startswith("gloo:"):
                    spans["communication"].append(span)
                    calls.append((span, name))
            elif _computes(event, name, on_gpu):
                spans["compute"].append(span)
    if on_gpu and not spans["compute"]:
        return dict.fromkeys(("communication_ms", "exposed_ms", "exposed_shares", "exposed")) | {"calls": []}
    exposed = without(merged(spans["communication"]), spans["compute"])
    shares = {}
    for name, phase_spans in phases.items():
        inside_phase = duration(exposed) - duration(without(exposed, phase_spans))
        shares[name] = inside_phase / duration(phase_spans) if duration(phase_spans) else 0.0
    return {
        "communication_ms": duration(spans["communication"]) / 1e3 / steps,
        "exposed_ms": duration(exposed) / 1e3 / steps,
        "exposed_shares": shares,
        "exposed": exposed,
        "calls": sorted(calls),
    }


def waiting_ms(trace: dict[str, Any], everyone: Sequence[list[tuple[Span, str]]], steps: int) -> float | None:
    """Return the part of a worker's exposed communication in which it waited for others, per step.

    everyone: the calls of each worker. None where they do not make the same ones, as in a pipeline, or send from one to
    the next, as in a ring.
    """
    names = [[name for _, name in calls] for calls in everyone]
    if trace["exposed"] is None or any(other != names[0] or "send" in str(other).lower() for other in names):
        return None
    waits = []
    for same_call in zip(trace["calls"], *everyone, strict=True):
        (begin, end), name = same_call[0]
        if any(kind in name.lower().replace("_", "") for kind in OF_EQUALS):
            waits.append((begin, end - min(last - first for (first, last), _ in same_call)))
    return (duration(trace["exposed"]) - duration(without(trace["exposed"], waits))) / 1e3 / steps


def _computes(event: dict, name: str, on_gpu: bool) -> bool:
    """A kernel, or on the CPU an operator that does arithmetic; what wraps a wait is not counted."""
    if on_gpu:
        return event.get("cat") == "kernel"
    return event.get("cat") == "cpu_op" and name.startswith("aten::") and event.get("tid") is not None
