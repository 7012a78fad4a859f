"""A small DistributedDataParallel: gradients travel in buckets while backward still computes the others.

    reducer = GradientReducer(model)       # once, after the process group is joined; all ranks have the same weights
    for batch in batches:
        model(batch).backward()            # sends buckets as soon as they are full
        reducer.finish()                   # waits for what is still in transit: now every gradient is the mean
        ...                                # clip, take a step, set the gradients to None

                          time ──>
    backward    layer 3 | layer 2 | layer 1 | layer 0 |
    hook                    ▲                   ▲                  a gradient is ready, and with it a bucket is full
    network                 |  bucket 0: 3, 2   |  bucket 1: 1, 0  |
    finish()                                          |── exposed ─|

With several micro-batches in a step, all backward passes but the last one run under `with reducer.no_sync():`.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

BUCKET_BYTES = 4 * 2**20


class Bucket:
    """Gradients that travel as one message.

    parameters: those whose gradients are in it.
    flat: the message, one contiguous tensor. pieces: views of it in the parameters' shapes, in the same order.
    missing: the parameters whose gradients are not ready yet.
    work: the handle of the collective, once it has been started.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        self.pieces = [p.view_as(q) for p, q in zip(self.flat.split(sizes), parameters, strict=True)]
        self.missing = set(parameters)
        self.work: Any = None


def make_buckets(order: Sequence[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Put parameters into buckets: every parameter is in exactly one of them, and the order stays the same.

    order: the parameters in the order in which their gradients become ready; the list does not change.
    bucket_bytes: the most that a bucket may hold; a larger parameter gets its own bucket.

    b.3  [1] Go through the parameters in the given order, and keep it.
         [2] Before you add a parameter, begin a new bucket if it does not fit into the current one or has a different
             dtype: a message has one dtype. Then add it.
    No bucket is empty; without parameters there are none.
    """
    buckets: list[list[Parameter]] = []
    # TODO(cos598d) b.3: fill the list of buckets (about 8 lines)
    # BEGIN SOLUTION b.3
    room = 0
    for parameter in order:
        fits = bool(buckets) and parameter.nbytes <= room and parameter.dtype == buckets[-1][0].dtype
        if not fits:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    # END SOLUTION b.3
    return buckets


def agree_on_order(ready: Iterable[Parameter], parameters: Sequence[Parameter]) -> list[Parameter]:
    """Return all parameters in the order in which rank 0's gradients became ready; the same order on every rank.

    ready: the order that this rank saw. It differs from rank to rank, and parameters without a gradient are missing.
    parameters: all of them, the same list on every rank; it does not change.

    b.3  [3] Write the order as a list of indices into `parameters`. Those that are missing in `ready` come last.
         [4] Broadcast rank 0's indices to all ranks. Then look up the parameters with these indices.
    """
    # TODO(cos598d) b.3: indices, broadcast, look up (about 6 lines)
    # BEGIN SOLUTION b.3
    index = {parameter: i for i, parameter in enumerate(parameters)}
    everything = dict.fromkeys([*ready, *parameters])  # each once, at its first place
    order = torch.tensor([index[parameter] for parameter in everything], device=parameters[0].device)
    dist.broadcast(order, src=0)
    return [parameters[i] for i in order.tolist()]
    # END SOLUTION b.3


class GradientReducer:
    """Averages the gradients of `model` over all ranks, in buckets, while backward runs.

    model: the same module with the same values on every rank. Parameters that do not require a gradient do not change.
    bucket_bytes: see make_buckets.

    Attributes
    buckets: in the order in which they are sent, on every rank. bucket_of: parameter -> its bucket.
    next_bucket: index of the first bucket that has not been sent in this step.
    sync: False inside no_sync().
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]  # a tied parameter is listed once
        self.bucket_bytes = bucket_bytes
        self.sync = True
        self.next_bucket = 0
        self.ready: dict[Parameter, None] | None = {}  # filled in the first step; None once all ranks use one order
        self._arrange(self.parameters[::-1])  # until then a guess: backward begins with the last layer
        # TODO(cos598d) b.4: have self.gradient_ready called for every parameter (2 lines)
        # BEGIN SOLUTION b.4
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        # END SOLUTION b.4

    def gradient_ready(self, parameter: Parameter) -> None:
        """The hook: backward calls it as soon as parameter.grad is complete, and continues when it returns.

        b.4  [1] In __init__: have backward call this method for each parameter, once per backward, when its gradient is
                 complete. A post-accumulate-grad hook does that; a hook of register_hook is called before backward adds
                 to parameter.grad.
             [2] Inside no_sync(), while self.sync is False, do nothing: more gradients will be added.
             [3] Remove the parameter from its bucket's `missing`.
             [4] Send the next bucket if nothing is missing in it any more, then the one after it, and so on. A bucket
                 that is full before its turn must wait: all ranks must send in the same order. Increase next_bucket.
        """
        if self.ready is not None:
            self.ready.setdefault(parameter)
        if self.sync and parameter not in self.bucket_of[parameter].missing:
            raise RuntimeError("a second backward before finish(); use no_sync() for all micro-batches but the last")
        # TODO(cos598d) b.4: [2] to [4] note that the gradient is ready, then send what is complete (about 6 lines)
        # BEGIN SOLUTION b.4
        if not self.sync:
            return
        self.bucket_of[parameter].missing.remove(parameter)
        while self.next_bucket < len(self.buckets) and not self.buckets[self.next_bucket].missing:
            self.send(self.buckets[self.next_bucket])
            self.next_bucket += 1
        # END SOLUTION b.4

    def send(self, bucket: Bucket) -> None:
        """Start to add up a bucket over all ranks and return at once; bucket.work is the handle to wait for.

        b.4  [5] Put each gradient into its piece. A parameter without a gradient counts as zeros: other ranks may have
                 one.
             [6] After finish, parameter.grad must be the mean. Prepare that here, or leave it to b.5 [2]: divide by the
                 number of ranks before you send, and set parameter.grad to the piece; then nothing has to be copied
                 back.
             [7] Start an all_reduce of `flat`, in its dtype, that does not wait, and keep its handle in bucket.work;
                 also if there is only one rank.
        """
        # TODO(cos598d) b.4: [5] to [7] fill the message and start to send it (about 7 lines)
        # BEGIN SOLUTION b.4
        for parameter, piece in zip(bucket.parameters, bucket.pieces, strict=True):
            if parameter.grad is None:
                piece.zero_()
            else:
                torch.div(parameter.grad, dist.get_world_size(), out=piece)
            parameter.grad = piece
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)
        # END SOLUTION b.4

    def finish(self) -> None:
        """Wait for the network; afterwards every parameter's gradient is the mean over all ranks, on every rank.

        Call it once per step, after the (last) backward and before anything reads a gradient. A parameter that got no
        gradient on any rank has a gradient of zeros.

        b.5  [1] Send all remaining buckets, in their order: some of their parameters got no gradient here.
             [2] Only then wait for every bucket, so that they travel at the same time. Do now what b.4 [6] left.
             [3] Prepare the next step: all gradients are missing, and the next bucket is the first.
        """
        # TODO(cos598d) b.5: [1] to [3] send the rest, wait for all, prepare the next step (about 6 lines)
        # BEGIN SOLUTION b.5
        for bucket in self.buckets[self.next_bucket :]:
            self.send(bucket)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.missing = set(bucket.parameters)
        self.next_bucket = 0
        # END SOLUTION b.5
        if self.ready is not None and self.parameters:  # the end of the first step
            self._arrange(agree_on_order(self.ready, self.parameters))
            self.ready = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside this block, backward adds up gradients on this rank and sends nothing.

        b.5  [4] Set self.sync to False for the block, and back to True at its end, even after an exception.
        """
        # TODO(cos598d) b.5: [4] switch sync off for the block (about 5 lines)
        # BEGIN SOLUTION b.5
        self.sync = False
        try:
            yield
        finally:
            self.sync = True
        # END SOLUTION b.5

    def _arrange(self, order: Sequence[Parameter]) -> None:
        """Make the buckets for this order."""
        self.buckets = [Bucket(parameters) for parameters in make_buckets(order, self.bucket_bytes)]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
