"""A record that also holds the cost of communication (exposed seconds, messages and bytes) and of memory.

torch's flight recorder, which a record reads, has no entry for a send over gloo. So sends are counted as they are made.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.optim import Optimizer

# PyTorch documents this class ("Extending torch with Modes") but does not export it under a public name,
# and its public TorchFunctionMode does not see c10d's operators. If a torch release moves it, this import stops
# run_gpt2.py at its first line. The lessons and their graders do not need it.
from torch.utils._python_dispatch import TorchDispatchMode

from beyond.rank_memory import persistent_bytes
from beyond.stage_runner import StageRunner
from common.config import BeyondConfig
from common.peak_memory import MB, PeakMemory
from common.record import Record
from common.workers.process_group import Worker


class SendCounter(TorchDispatchMode):
    """Inside `with counter:` every send of this thread is counted; what runs in a thread of torch's own is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is torch.ops.c10d.send.default:
            self.count += 1
            self.bytes += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


class CommunicationRecord(Record):
    """A Record whose `collectives` also lists sends, and which has a summary per iteration under `communication`."""

    def __init__(self, config: BeyondConfig, worker: Worker, memory: PeakMemory) -> None:
        super().__init__(config, worker)
        self.memory = memory
        self.sends = SendCounter()
        self.persistent = 0
        self.watched: tuple[nn.Module, Optimizer] | None = None
        self.runner: StageRunner | None = None  # counts its own sends: a mode would slow the whole step down

    def watch_memory(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Measure what training needs, and count parameters, gradients and optimizer state when all of them exist."""
        self.watched = model, optimizer
        self.memory.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name), self.sends if name == "communication" else contextlib.nullcontext():
            yield
        self.memory.sample()
        # In the second iteration, the optimizer has created its state. ZeRO-1 has its gradients between these two
        # phases only; a shard's gradient exists after communication.
        if self.watched and name in ("backward", "communication") and len(self._iterations) == 1:
            self.persistent = max(self.persistent, persistent_bytes(*self.watched))

    def as_dict(self) -> dict:
        record = super().as_dict()
        sends = self.runner or self.sends
        if sends.count:
            record["collectives"].append({"name": "send", "count": sends.count, "bytes": sends.bytes})
        steps = max(1, len(self._iterations))
        exposed = [iteration["phases"]["communication"] for iteration in self._iterations[1:]]
        record["communication"] = {
            "exposed_seconds": sum(exposed) / len(exposed) if exposed else None,
            "messages": sum(entry["count"] for entry in record["collectives"]) / steps,
            "bytes": sum(entry["bytes"] for entry in record["collectives"]) / steps,
        }
        self.memory.stop()
        peaks = {"peak_bytes": self.memory.bytes, "process_peak_bytes": self.memory.process_bytes}
        record["memory"] = {"persistent_bytes": self.persistent, **peaks}
        return record

    def _print_summary(self) -> None:
        super()._print_summary()
        record = self.as_dict()
        communication, memory = record["communication"], record["memory"]
        if communication["exposed_seconds"] is not None:
            print(
                f"communication per iteration: {communication['exposed_seconds']:.4f} s not hidden by backward, "
                f"{communication['messages']:.1f} messages, {communication['bytes']:,.0f} bytes passed to calls"
            )
        persistent, peak, process = (None if size is None else f"{size / MB:,.0f} MB" for size in memory.values())
        print(
            f"memory of this worker: {persistent} of parameters, gradients and optimizer state; a step needs "
            f"{peak or 'unknown'} at its peak; the process had at most {process or 'unknown'}"
        )
