"""Write the check: look at one averaging step of all ranks, and say what is wrong with it.

    what ranks had        what they called               what they hold
    rank 0   [1 2]   ──┐  all_reduce of 2 numbers  ┌──   rank 0   [2 3]
    rank 1   [2 4]   ──┼─ all_reduce of 2 numbers ─┼──   rank 1   [2 3]
    rank 2   [3 3]   ──┘  all_reduce of 2 numbers  └──   rank 2   [2 3]

A run whose gradients are a little wrong does not stop: it trains, and ends with a worse model. So people who write such
steps also write the check that runs beside them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor | None]  # name of a parameter -> its gradient on one rank; None: it has none


@dataclass(frozen=True)
class Call:
    """One collective, send or recv of one rank.

    name: such as "all_reduce", "gather", "reduce_scatter", "send" or "recv". numel: the elements of the rank's own
    tensor; where a call takes a list of tensors, of one of them. peer: the other rank of a send or recv; the root of a
    collective that has one. finished: False if the rank has never waited for it, or waits still.
    """

    name: str
    numel: int
    dtype: torch.dtype
    peer: int | None
    finished: bool


def check(before: Sequence[Gradients], after: Sequence[Gradients], calls: Sequence[Sequence[Call]]) -> str | None:
    """Return what is wrong with an averaging step, in one line, or None if it is right. This code is given.

    Args:
        before: the gradients of each rank before the step.
        after: the gradients of each rank after it. Names, shapes and dtypes are the same on all ranks, and as before.
        calls: what each rank has called in between, in its order.
    """
    return wrong_gradients(before, after) or wrong_calls(calls)


def wrong_gradients(before: Sequence[Gradients], after: Sequence[Gradients]) -> str | None:
    """Return which gradient is not the mean of all ranks, or None.

    b.18 [1] For each parameter, compute what every rank must hold: None if no rank had a gradient, else the mean over
             all ranks, where a missing gradient counts as zeros. Use more digits than the gradients have.
         [2] Compare with what each rank holds: whether there is a gradient, and every element. An element may be as far
             off as rounding can bring it, in any order of summation (the page has the limit).
         [3] inf and nan have no distance: each must be where the mean has the same, and nowhere else.
    """
    # TODO(cos598d) b.18: [1] to [3] compare what each rank holds with the mean (about 16 lines)
    # BEGIN SOLUTION b.18
    for name in before[0]:
        had = [gradients[name] for gradients in before]
        present = [gradient for gradient in had if gradient is not None]
        for rank, gradients in enumerate(after):
            held = gradients[name]
            if held is None or not present:
                if held is not None or present:
                    return f"rank {rank}, {name}: expected {'a gradient' if present else 'None'}"
                continue
            exact = torch.stack(present).double()
            mean = exact.sum(0) / len(before)
            near = (held - mean).abs() <= torch.finfo(held.dtype).eps * exact.abs().sum(0)
            if not torch.where(mean.isfinite(), near, (held == mean) | (held.isnan() & mean.isnan())).all():
                return f"rank {rank}, {name}: not the mean of all ranks"
    return None
    # END SOLUTION b.18


def wrong_calls(calls: Sequence[Sequence[Call]]) -> str | None:
    """Return which call is unfinished, missing or one too many, or None.

    b.18 [4] Every call must be finished. If there are other ranks, every rank must call something.
         [5] The collectives of all ranks must be the same, in the same order.
         [6] Each send needs its recv on the other rank, and each recv its send.
    """
    # TODO(cos598d) b.18: [4] to [6] compare the calls of all ranks; begin with return None (about 16 lines)
    # BEGIN SOLUTION b.18
    messages: Counter[tuple] = Counter()  # those that are sent and not received
    for rank, called in enumerate(calls):
        if not called and len(calls) > 1:
            return f"rank {rank} has called nothing"
        for call in called:
            if not call.finished:
                return f"rank {rank}: its {call.name} of {call.numel} elements is not finished"
            if call.name == "send":
                messages[rank, call.peer, call.numel, call.dtype] += 1
            elif call.name == "recv":
                messages[call.peer, rank, call.numel, call.dtype] -= 1
    collectives = [[call for call in called if call.name not in ("send", "recv")] for called in calls]
    if any(called != collectives[0] for called in collectives):
        return "the ranks have called different collectives"
    if any(messages.values()):
        return "a message was sent and not received, or the other way round"
    return None
    # END SOLUTION b.18
