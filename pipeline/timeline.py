"""Records, saves and draws a step of a pipeline: a box for every forward or backward of one micro-batch."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from common.figures import figure
from common.paths import atomic_write


@dataclass(frozen=True)
class TaskBox:
    """A partition was busy with a micro-batch from `begin` to `end` (seconds)."""

    phase: str  # "forward" or "backward"
    partition: int
    micro_batch: int
    begin: float
    end: float


@dataclass
class Trace:
    """Collects boxes from every call of a pipe while it is set as `pipe.trace`."""

    boxes: list[TaskBox] = field(default_factory=list)

    @contextmanager
    def box(self, phase: str, partition: int, micro_batch: int, device: torch.device) -> Iterator[None]:
        """Time the block.

        On a GPU, wait for the work to finish; a run without a trace does not wait.
        """
        begin = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.boxes.append(TaskBox(phase, partition, micro_batch, begin, time.perf_counter()))

    @property
    def partitions(self) -> int:
        return 1 + max(box.partition for box in self.boxes)

    @property
    def duration(self) -> float:
        """Seconds from the first start to the last end, including what happens between forward and backward."""
        return max(box.end for box in self.boxes) - min(box.begin for box in self.boxes)

    @property
    def speedup(self) -> float:
        """Busy time of all partitions divided by the duration: how many partitions worked at a time, on average."""
        return sum(box.end - box.begin for box in self.boxes) / self.duration

    @property
    def bubble(self) -> float:
        """Share of the partitions' time in which they did nothing; ideally (K-1) / (M+K-1)."""
        return 1 - self.speedup / self.partitions

    def in_words(self) -> str:
        """Return how busy the partitions were. Only a model that is cut has a bubble."""
        if self.partitions == 1:
            return f"the blocks compute {self.speedup:.1%} of the time"
        return f"bubble {self.bubble:.1%}, {self.speedup:.2f} partitions busy on average"

    def save(self, path: str | Path) -> None:
        """Write Chrome's trace format; chrome://tracing and Perfetto open it. Times in it are microseconds."""
        start = min(box.begin for box in self.boxes)
        events: list[dict] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": j, "args": {"name": f"partition {j}"}}
            for j in range(self.partitions)
        ]
        events += [
            {
                "ph": "X",
                "name": f"{box.phase[0].upper()}{box.micro_batch}",
                "cat": box.phase,
                "pid": 0,
                "tid": box.partition,
                "ts": (box.begin - start) * 1e6,
                "dur": (box.end - box.begin) * 1e6,
                "args": {"micro_batch": box.micro_batch},
            }
            for box in self.boxes
        ]
        with atomic_write(path) as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def draw(self, path: str | Path, title: str = "") -> None:
        """Draw the boxes: one row per partition, time from left to right, bubble and speed-up in the title."""
        start = min(box.begin for box in self.boxes)
        with figure(path, width=6.6, height=1.2 + 0.6 * self.partitions) as axes:
            for box in self.boxes:
                left, width = 1e3 * (box.begin - start), 1e3 * (box.end - box.begin)
                colour = {"forward": "#8fbbe8", "backward": "#f2c179"}[box.phase]
                axes.barh(box.partition, width, left=left, height=0.8, color=colour, edgecolor="black", linewidth=0.6)
                label = f"{box.phase[0].upper()}{box.micro_batch}"
                axes.text(left + width / 2, box.partition, label, ha="center", va="center", fontsize=8)
            axes.set_yticks(range(self.partitions), [f"partition {j}" for j in range(self.partitions)])
            axes.invert_yaxis()
            axes.set_xlabel("time (ms)")
            axes.set_title(f"{title}  {self.in_words()}".strip())


@contextmanager
def traced_blocks(trace: Trace, blocks: Sequence[nn.Module], devices: Sequence[torch.device]) -> Iterator[None]:
    """A context in which every block's forward and backward makes a box.

    It draws the same picture for a model without a pipe. Neighbouring blocks on one device count as one partition.
    """
    begins: dict[str, float] = {}

    def begin(phase: str, *_: object) -> None:
        begins[phase] = time.perf_counter()

    def end(phase: str, partition: int, device: torch.device, *_: object) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        trace.boxes.append(TaskBox(phase, partition, 0, begins[phase], time.perf_counter()))

    hooks, partition = [], 0
    for i, (block, device) in enumerate(zip(blocks, devices, strict=True)):
        partition += i > 0 and device != devices[i - 1]
        hooks += [
            block.register_forward_pre_hook(partial(begin, "forward")),
            block.register_forward_hook(partial(end, "forward", partition, device)),
            block.register_full_backward_pre_hook(partial(begin, "backward")),
            block.register_full_backward_hook(partial(end, "backward", partition, device)),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
