"""A record that also keeps what a run sent: the tensors, and the interface's counters around training.

    record.sent                  list of the tensors of this iteration; sync_gradients appends to it
    traffic_{r}.json             tensors by iteration, windows, framing
    counters_{r}.csv             the interface's counters, ten times a second and at every iteration;
                                 counters_{r}.csv.part while the run lasts, and after a crash

A window is one epoch's training on all workers, between two barriers: what happens outside it (downloads, loading,
joining, evaluation) is not counted.
"""

import json
import os
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from common.config import TrafficConfig
from common.paths import atomic_write
from common.record import Record
from common.workers.process_group import Worker, interface_towards
from task4_traffic.counters import Counter
from task4_traffic.expected import DTYPES
from task4_traffic.sample import Sample

# Bytes in front of every packet, as an interface counts them: Ethernet 14, IP 20, TCP 20 and its time stamps 12.
PACKET_HEADER = 66
CALIBRATION_BYTES = 50e6  # a small model's calibration is repeated, up to about this many bytes
REPEATS = 5  # the most repetitions in a trial
# By itself, NCCL doubles small messages (LL), sends along trees, and past the interface: InfiniBand, GPU to GPU.
COUNTABLE = {
    "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
}  # fmt: skip
TRIALS = 5  # the median of the trials is used, because the system decides when it sends acknowledgements


def plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry in a form that fits into a file: a dtype as text, a shape as a list."""
    return {
        "shape": [int(n) for n in entry["shape"]],
        "dtype": str(entry["dtype"]),
        "elements": int(entry["elements"]),
        "bytes": int(entry["bytes"]),
    }


class TrafficRecord(Record):
    """A Record with `sent`: for every tensor of the current iteration a dict of shape, dtype, elements and bytes."""

    config: TrafficConfig

    def __init__(self, config: TrafficConfig, worker: Worker) -> None:
        if config.backend == "nccl":  # NCCL reads its variables with the first collective
            for name, value in COUNTABLE.items():
                os.environ.setdefault(name, value)
        super().__init__(config, worker)
        self.sent: list[dict[str, Any]] = []
        self._groups: list[dict[str, Any]] = []  # iterations that sent the same tensors: how many, and which
        self._windows: list[dict[str, float]] = []
        self.dtype = DTYPES[config.grad_dtype]
        self.interface = config.interface or interface_towards(config.master_ip) or "lo"
        # Renamed at the end: until then, the file of an earlier run may have this name.
        self._counters = config.output_dir / f"counters_{worker.rank}.csv"
        self._counter = Counter(self.interface, self._counters.with_name(f"{self._counters.name}.part"))

    def iterations(self, loader: Iterable) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches of one epoch; the window opens before the first and closes after the last."""
        self._open_window(f"window {len(self._windows) + 1} begins")
        done = len(self._iterations)
        self.sent = []
        yield from super().iterations(loader)
        self._close_window(len(self._iterations) - done)

    def _finish_iteration(self, seconds: float) -> None:
        super()._finish_iteration(seconds)
        self._counter.mark(f"iteration {len(self._iterations)}")
        sent, self.sent = [plain(entry) for entry in self.sent], []
        if self._groups and self._groups[-1]["tensors"] == sent:
            self._groups[-1]["iterations"] += 1
        else:
            self._groups.append({"iterations": 1, "tensors": sent})

    def _open_window(self, event: str) -> Sample:
        dist.barrier()  # no rank sends before all are here, ...
        self._window_begun = self._counter.mark(event)
        return self._window_begun

    def _close_window(self, iterations: int) -> None:
        dist.barrier()  # ... and everything has arrived when all are here again
        end = self._counter.mark(f"window {len(self._windows) + 1} ends")
        self._windows.append({"iterations": iterations, **between(self._window_begun, end)})

    def write(self) -> None:
        """Calibrate the framing, then write all files of this rank, the record last: it says that all are there."""
        framing = self._calibrate()
        self._counter.stop()
        traffic = {
            "rank": self.worker.rank,
            "world_size": self.worker.world_size,
            "interface": self.interface,
            "grad_dtype": self.config.grad_dtype,
            "sent": self._groups,
            "windows": self._windows,
            "framing": framing,
        }
        with atomic_write(self.config.output_dir / f"traffic_{self.worker.rank}.json") as file:
            json.dump(traffic, file, indent=1)
        self._counters.with_name(f"{self._counters.name}.part").replace(self._counters)
        super().write()

    def _calibrate(self) -> dict[str, float]:
        """Measure the bytes that one iteration moves in addition to its payload, separately from training.

        The same bytes are sent twice: as the tensors of an iteration, and as one tensor. The payload is the same, so
        the difference is the cost of many messages. The one large tensor only adds the headers of its packets.
        """
        # All ranks use rank 0's list: with lists of different lengths, they would wait for each other forever.
        lists = [[(entry["elements"], entry["dtype"]) for entry in self._groups[0]["tensors"]] if self._groups else []]
        device = self.worker.device
        dist.broadcast_object_list(lists, src=0, device=device)
        dtypes = [getattr(torch, str(name).split(".")[-1]) for _, name in lists[0]]
        sizes = [elements for elements, _ in lists[0]]
        tensors = [torch.zeros(n, dtype=dtype, device=device) for n, dtype in zip(sizes, dtypes, strict=True)]
        if not tensors:
            return {"sent": 0.0, "received": 0.0, "messages": 0}
        flat = torch.cat(tensors)
        rounds = CALIBRATION_BYTES / (flat.numel() * flat.element_size())
        times, trials = (REPEATS, TRIALS) if rounds >= REPEATS * TRIALS else (1, 1)
        extras: dict[str, list[float]] = {"sent": [], "received": []}
        for _ in range(trials):
            many, one = self._measure(tensors, times), self._measure([flat], times)
            for way, values in extras.items():
                headers = PACKET_HEADER * one[f"{way}_packets"]
                values.append((many[way] - one[way] + headers) / times)
        extra = {way: statistics.median(values) for way, values in extras.items()}
        return {**extra, "messages": len(tensors)}

    def _measure(self, tensors: list[torch.Tensor], times: int) -> dict[str, float]:
        begin = self._open_window("calibration begins")
        for _ in range(times):
            for tensor in tensors:
                all_reduce(tensor)
            self.worker.pulse.beat()
        dist.barrier()
        return between(begin, self._counter.mark("calibration ends"))


def between(begin: Sample, end: Sample) -> dict[str, float]:
    """Return what the interface moved between two readings, with the keys of a window."""
    return {
        "begin": begin.time,
        "end": end.time,
        "received": end.received - begin.received,
        "sent": end.sent - begin.sent,
        "received_packets": end.received_packets - begin.received_packets,
        "sent_packets": end.sent_packets - begin.sent_packets,
    }


def all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` over all ranks with torch's internal call; the usual one is what region 2b.1 asks for."""
    group: Any = dist.group.WORLD
    group.allreduce([tensor]).wait()
