"""Runs a student's Pipe.forward with a schedule of the grader's, and a compute() that asks the referee."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from grader.inside.context import Context
from grader.probes.pipeline.pipe import make_pipe

MAX_PAIRS = 100  # pairs of one call, and micro-batches, that are reported


class ForwardStandIns:
    """Stand for _clock_cycles and Pipe.compute. What they are called with, and what compute makes of it, only the
    referee knows: see referee_forward."""

    def __init__(self, ask: Callable[..., Any], last: str) -> None:
        self._ask, self.last = ask, last

    def clock_cycles(self, num_batches: int, num_partitions: int) -> Iterator[list[tuple[int, int]]]:
        self._ask("schedule", sizes=[int(num_batches), int(num_partitions)])
        for partition in range(num_partitions):  # in the order of no pipeline, but a legal one
            yield [(micro_batch, partition) for micro_batch in range(num_batches)]

    def compute(self, batches: list[torch.Tensor], schedule: list[tuple[int, int]]) -> None:
        pairs, nested = _flat(schedule)
        sizes = [len(batch) for batch in batches][:MAX_PAIRS]
        given = [_content(batch) for batch in batches[:MAX_PAIRS]]
        pairs = pairs[:MAX_PAIRS]
        inputs = [_content(batches[i]) if 0 <= i < len(batches) else None for i, _ in pairs]
        results = self._ask("compute", pairs=pairs, nested=nested, sizes=sizes, given=given, inputs=inputs)
        for (i, _), result in zip(pairs, results, strict=True):
            if result is not None:
                batches[i] = result.clone().to(self.last)


def _content(batch: object) -> torch.Tensor | None:
    """A micro-batch as it is sent; zeros for one on the device "meta", which has no content."""
    if not torch.is_tensor(batch):
        return None
    return torch.zeros(batch.shape, dtype=batch.dtype) if batch.is_meta else batch.detach()


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

    Arguments: file, stages, split_size, last (the device of the results), mine (batches, one call for each).
    What is returned: for each call the output, whether the input was `changed`, and the output `moved` away.
    """
    a = context.arguments
    module = context.load(a["file"])
    devices = [*(f"cpu:{j}" for j in range(a["stages"] - 1)), a["last"]]
    pipe = make_pipe(module, [nn.Identity() for _ in devices], a["split_size"], devices)
    results: list[Any] = []
    for x in a["mine"]:
        context.ask("begin")
        stand_ins = ForwardStandIns(context.ask, a["last"])
        module._clock_cycles = stand_ins.clock_cycles  # type: ignore[attr-defined]
        pipe.compute = stand_ins.compute
        results.append({"output": None, "moved": False, "changed": False})
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
