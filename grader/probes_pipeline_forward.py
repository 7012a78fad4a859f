"""Runs a student's Pipe.forward with a schedule and a compute() of the grader's."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from grader.probes import Context
from grader.probes_pipeline_pipe import make_pipe

MAX_CALLS = 200  # calls of compute that are reported
MAX_PAIRS = 100  # pairs of one call that are reported


class ForwardStandIns:
    """Stand for _clock_cycles and Pipe.compute, and note what they were called with.

    Partition j makes factors[i, j] x + shifts[i, j] of micro-batch i.
    """

    def __init__(self, stages: int, last: str, shape: str, factors: torch.Tensor, shifts: torch.Tensor) -> None:
        self.stages, self.last, self.shape, self.factors, self.shifts = stages, last, shape, factors, shifts
        self.asked: list[list[int]] = []
        self.calls: list[dict[str, Any]] = []

    def clock_cycles(self, num_batches: int, num_partitions: int) -> Iterator[list[tuple[int, int]]]:
        self.asked.append([int(num_batches), int(num_partitions)])
        for partition in range(num_partitions):  # in the order of no pipeline, but a legal one
            yield [(micro_batch, partition) for micro_batch in range(num_batches)]

    def compute(self, batches: list[torch.Tensor], schedule: list[tuple[int, int]]) -> None:
        pairs, nested = _flat(schedule)
        if len(self.calls) < MAX_CALLS:
            call = {"sizes": [len(batch) for batch in batches][:MAX_PAIRS], "pairs": pairs[:MAX_PAIRS]}
            given = [batch.detach().clone() if torch.is_tensor(batch) else None for batch in batches[:MAX_PAIRS]]
            self.calls.append(call | {"nested": nested, "given": [] if self.calls else given})
        for i, j in pairs:
            if 0 <= i < min(len(batches), len(self.factors)) and 0 <= j < self.stages:
                result = self.factors[i, j] * batches[i] + self.shifts[i, j]
                batches[i] = (change_shape(result, self.shape) if j == self.stages - 1 else result).to(self.last)


def change_shape(x: torch.Tensor, shape: str) -> torch.Tensor:
    """What the last partition makes of its result: another shape, and for "flat" and "deep" another type."""
    if shape == "flat":  # (B, ...) -> (B,)
        return x.double().flatten(1).sum(1) / 2
    if shape == "deep":  # (B, ...) -> (B, ..., 2)
        return torch.stack([x.double(), -x.double()], dim=-1)
    return x


def _flat(schedule: Any) -> tuple[list[list[int]], bool]:
    """The pairs of a call, and whether they came as a list of clock cycles. Raises what int() raises."""
    pairs: list[list[int]] = []
    nested = False
    for item in schedule:
        first, *rest = list(item) or [None]
        if first is None or isinstance(first, tuple | list):
            nested = True
            pairs += [[int(i), int(j)] for i, j in ([first, *rest] if first is not None else [])]
        else:
            i, j = item
            pairs.append([int(i), int(j)])
    return pairs, nested


def forward(context: Context) -> list[Any]:
    """Pipe.forward with a compute() and a schedule of ours.

    Arguments: file, stages, split_size, last (the device of the results), shape, mine (batches, one call for each, and
    factors and shifts of the stand-ins).
    What is returned: for each call the sizes and pairs that compute got, the micro-batches of its first call, what the
    schedule was asked for, the output.
    """
    a = context.arguments
    module = context.load(a["file"])
    devices = [*(f"cpu:{j}" for j in range(a["stages"] - 1)), a["last"]]
    pipe = make_pipe(module, [nn.Identity() for _ in devices], a["split_size"], devices)
    results: list[Any] = []
    for x in a["mine"]["batches"]:
        stand_ins = ForwardStandIns(a["stages"], a["last"], a["shape"], a["mine"]["factors"], a["mine"]["shifts"])
        module._clock_cycles = stand_ins.clock_cycles  # type: ignore[attr-defined]
        pipe.compute = stand_ins.compute
        seen: dict[str, Any] = {"asked": stand_ins.asked, "calls": stand_ins.calls, "moved": False, "changed": False}
        results.append(seen | {"output": None})
        mine = x.clone()
        try:
            output = pipe.forward(mine)
        except NotImplementedError as error:
            if "meta" not in str(error):
                raise
            results[-1]["moved"] = True  # what lies on the device "meta" cannot be copied away from it
            continue
        if isinstance(output, torch.Tensor):
            on_meta = output.device.type == "meta"
            results[-1]["output"] = torch.zeros(output.shape) if on_meta else output
        results[-1]["changed"] = not torch.equal(mine, x)
    return results
