"""--timeline from beginning to end: a Record calls this in every step, and at the end of the run it writes the files.

timeline.png     the picture, for the report
timeline.html    the same for a browser: zoom, and point at a box
timeline.json    for https://ui.perfetto.dev
"""

import secrets
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from common.config import RunConfig
from common.paths import shown
from common.timeline.boxes import Timeline
from common.timeline.capture import Capture
from common.timeline.clocks import Clock, Reading, read_clocks
from common.timeline.collect import assemble, gather
from common.timeline.collector import collector_off
from common.timeline.page import write_page
from common.timeline.parts import parts, table
from common.timeline.picture import draw
from common.timeline.trace import write_trace
from common.workers.process_group import Worker


class RunTimeline:
    """The timeline of a run: `capture` collects it on every rank, rank 0 brings it together."""

    def __init__(self, config: RunConfig, worker: Worker) -> None:
        self.capture = Capture(worker.rank, config.timeline, worker.device.type == "cuda")
        self._title = f"{config.task}, {config.world_size} worker{'s' * (config.world_size > 1)}"
        self._worker = worker
        self._clocks: list[list[Reading]] = []  # on rank 0: of every rank, before and after training
        self._timeline: Timeline | None = None

    def read_clocks(self) -> None:
        """Compare the clocks of all ranks. Every rank must call it, before training and after it."""
        if self._worker.world_size > 1:
            self._clocks.append(read_clocks(self._worker.device) or [])
        else:
            self._clocks.append([Reading(0.0)])

    def finish(self) -> dict | None:
        """Bring together what all ranks saw; return this rank's numbers for its record. Every rank must call it."""
        self.capture.stop()
        if not self.capture.seen.steps:
            return None
        self.read_clocks()
        everyone = gather(self.capture.seen)
        numbers: list = [None]
        if everyone:
            clocks = [Clock(first, last) for first, last in zip(*self._clocks, strict=True)]
            self._timeline = assemble(self._title, secrets.token_hex(8), everyone, clocks)
            rows = [asdict(row) for row in parts(self._timeline)]
            numbers = [{"run": self._timeline.run, "clock_error": self._timeline.clock_error, "steps": rows}]
        if self._worker.world_size > 1:
            dist.broadcast_object_list(numbers, src=0, device=self._worker.device)
            numbers[0]["steps"] = [row for row in numbers[0]["steps"] if row["rank"] == self._worker.rank]
        return numbers[0]

    def write(self, folder: Path) -> None:
        """Write the three files, and print where the time of a step went; only rank 0 has something to write."""
        if self._timeline is None:
            if self._worker.is_first:
                print("no timeline: this run had no training step")
            return
        with collector_off():
            write_trace(self._timeline, folder / "timeline.json")
            write_page(self._timeline, folder / "timeline.html")
            draw(self._timeline, folder / "timeline.png")
        print(table(self._timeline))
        print(f"timeline: {shown(folder)}/timeline.png, timeline.html (a browser), timeline.json (ui.perfetto.dev)")
