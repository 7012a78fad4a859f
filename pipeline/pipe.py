"""Runs a model as a pipeline: micro-batches move from partition to partition, and all partitions work at once.

    x ── [1] split ──> micro-batches ── [2] schedule ── [3] one compute() per clock cycle ──> [4] concatenate ──> output

    clock          0   1   2   3   4
    partition 0    F0  F1  F2  F3  .      compute(batches, [(2, 0), (1, 1)]) is column 2: two tasks, two workers.
    partition 1    .   F0  F1  F2  F3     Micro-batch 2 goes to partition 0 while micro-batch 1 goes to partition 1.

backward() on the loss runs the pipeline in reverse; see backward.py.

Source: GPipe (Huang et al., 2019), section 2; torchgpipe (Kim et al., 2020), section 3.
"""

from functools import partial

import torch
from torch import nn

from common.errors import InputError
from common.schedule import _clock_cycles
from pipeline.backward import SplitStage, call_with_overlapping_backward
from pipeline.partition import _layers, _split_module
from pipeline.timeline import Trace
from pipeline.worker import Task, create_workers


class Pipe(nn.Module):
    """Computes the same as `module`, but in micro-batches of `split_size` examples, with one worker per partition.

    module: layers that return one tensor each; WithDevice labels or the layers' own devices say where to cut.
    split_size: examples in a micro-batch (not the number of micro-batches); the last one may be smaller.

    Attributes: partitions and devices, in_queues and out_queues (one of each per partition), and `trace`: if you set a
    Trace, it records what happens. Raises InputError if two partitions share a parameter.
    """

    def __init__(self, module: nn.Sequential, split_size: int = 1) -> None:
        super().__init__()
        if int(split_size) != split_size or split_size < 1:
            raise InputError(f"split_size: expected 1 or more examples per micro-batch, got {split_size}")
        self.split_size = int(split_size)
        if not any(True for _ in _layers(module)):
            raise InputError("expected a Sequential with at least one layer, got an empty one")
        partitions, self.devices = _split_module(module)
        self.partitions = nn.ModuleList(SplitStage(j, *partition) for j, partition in enumerate(partitions))
        _refuse_shared_parameters(self.partitions)
        self.in_queues, self.out_queues = create_workers(self.devices)
        self.trace: Trace | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run forward(), with a backward that overlaps in the same way. Raises what a layer raised."""
        if not isinstance(x, torch.Tensor) or x.dim() == 0:
            raise InputError(f"expected one tensor (B, ...) of B examples as the pipe's input, got {type(x).__name__}")
        return call_with_overlapping_backward(self, super().__call__, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send the batch x (B, ...) through the pipeline; the output (B, ...) is on the last device. B is at least 1.

        Steps
        [1] Split the batch into micro-batches of split_size examples; the last one may be smaller.
        [2] Make the schedule for that many micro-batches and partitions.
        [3] Call self.compute once for every clock cycle, with that cycle's list.
        [4] Concatenate the micro-batches, in their order, along the examples; x does not change. Keep nothing of the
            call: a micro-batch holds its whole graph.
        """
        # TODO(cos598d) p.3: split, run the schedule clock by clock, concatenate (4 lines)
        # BEGIN SOLUTION p.3
        batches = list(x.split(self.split_size))
        for schedule in _clock_cycles(len(batches), len(self.partitions)):
            self.compute(batches, schedule)
        return torch.cat(batches)
        # END SOLUTION p.3

    def compute(self, batches: list[torch.Tensor], schedule: list[tuple[int, int]]) -> None:
        """Run one clock cycle: compute every (micro-batch, partition) of `schedule`, all at the same time.

        Each result replaces its micro-batch in `batches`, where the next cycle finds it.

        Steps
        [1] Move the micro-batch to the device of its partition.
        [2] Make a Task of the partition's computation and put it into the partition's in-queue. Put all tasks of the
            cycle before you get any result: get() blocks, and in the meantime the other workers would be idle.
        [3] Get each result from the out-queue of its partition, however long that takes. If the task failed, raise its
            exception.
        [4] Store the result in `batches`.

        If several tasks fail, any of their exceptions may be raised.
        """
        # TODO(cos598d) p.4: hand out the tasks of one clock cycle, then collect their results (8 lines)
        # BEGIN SOLUTION p.4
        for micro_batch, j in schedule:
            batch = batches[micro_batch].to(self.devices[j])
            self.in_queues[j].put(Task(partial(self.partitions[j], batch)))
        for micro_batch, j in schedule:
            success, result = self.out_queues[j].get()
            if not success:
                raise result[1].with_traceback(result[2])
            batches[micro_batch] = result[1]
        # END SOLUTION p.4


def _refuse_shared_parameters(partitions: nn.ModuleList) -> None:
    """A shared parameter would need its gradient summed across workers, and on GPUs its values kept equal."""
    owner: dict[nn.Parameter, str] = {}
    for j, partition in enumerate(partitions):
        for name, parameter in partition.named_parameters():
            here = f"partition {j} ({name})"
            if owner.setdefault(parameter, here).split(" (")[0] != f"partition {j}":
                raise InputError(
                    f"expected every parameter in one partition only, got one in {owner[parameter]} and in {here}; "
                    "put both layers on one device, or give each its own parameter"
                )
