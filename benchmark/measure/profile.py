"""A few steps under torch.profiler: communication, and its exposed part.

    main thread   [ forward ][ backward          ]....[ optimizer ]
    gloo               [=== all_reduce ===] [== all_reduce ==]        total: both; exposed: the dots, where nothing
                                                                      was computed meanwhile

The traced steps are not timed: what the profiler costs stays out of the other figures.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from benchmark.measure.output import MB
from common.figures import COLOURS, figure
from common.timeline.spans import Span, duration, merged, without

COMMUNICATION = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
Event = dict  # of Chrome's trace format


class Tracer:
    """Records all that happens from start() to stop(); `mark` names a part of it.

    keep: a file for the whole trace; beside it come a table of the operators, and the memory over time.
    """

    def __init__(self, on_gpu: bool, keep: Path | None = None) -> None:
        self.keep, self.on_gpu = keep, on_gpu
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # errors only: it tells each start and stop otherwise
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profile = profile(activities=activities, profile_memory=keep is not None)

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> list[Event]:
        """Return all events since the start that have a duration."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = self.keep or Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            events: list[Event] = json.loads(file.read_text())["traceEvents"]
        if self.keep:
            operators = self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=50)
            name = self.keep.stem.removeprefix("trace")
            self.keep.with_name(f"operators{name}.txt").write_text(operators)
            draw_memory(self.keep.with_name(f"memory{name}.png"), events, self.on_gpu)
        return [event for event in events if event.get("ph") == "X"]


def draw_memory(path: Path, events: list[Event], on_gpu: bool) -> None:
    """Draw what torch has allocated on the device over time."""
    kind = 1 if on_gpu else 0  # torch's DeviceType
    looks = [one for one in events if one["name"] == "[memory]" and one["args"]["Device Type"] == kind]
    with figure(path) as axes:
        times = [(float(one["ts"]) - float(looks[0]["ts"])) / 1e3 for one in looks]
        axes.plot(times, [one["args"]["Total Allocated"] / MB for one in looks], color=COLOURS[0])
        axes.set(xlabel="ms since the trace began", ylabel="allocated by torch since then, MB")


def mark(name: str) -> record_function:
    return record_function(f"phase:{name}")


def span_of(event: Event) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def communication_of(events: list[Event], name: str, on_gpu: bool = False) -> tuple[float | None, float | None]:
    """Return communication() of the steps with this name: each is a part that mark() has named so."""
    of_name = (event for event in events if event["name"] == f"phase:{name}" and event["cat"] == "user_annotation")
    steps = list(map(span_of, of_name))
    inside = [event for event in events if any(begin < float(event["ts"]) < end for begin, end in steps)]
    return communication(inside, len(steps), on_gpu)


def communication(events: Iterable[Event], steps: int, on_gpu: bool = False) -> tuple[float | None, float | None]:
    """Return the ms in a step in which something was sent, and those of them in which nothing was computed.

    On a GPU, kernels count, since a call of NCCL ends when it is queued. None where the profiler saw none.
    """
    sending, computing = list[Span](), list[Span]()
    for event in events:
        name, kind = str(event["name"]), event.get("cat")
        if name.startswith(COMMUNICATION):
            if not on_gpu or kind == "kernel" or name.startswith("gloo:"):
                sending.append(span_of(event))
        elif kind == "kernel" if on_gpu else kind == "cpu_op" and name.startswith("aten::"):
            computing.append(span_of(event))
    if on_gpu and not computing:
        return None, None
    exposed = without(merged(sending), computing)
    return duration(sending) / 1e3 / steps, duration(exposed) / 1e3 / steps
