"""ZeRO-1 and ZeRO-2: every rank has the whole model, but the state of the optimizer is divided among the ranks.

    sharded = ShardedOptimizer(model, model.transformer.h, partial(AdamW, lr=1e-4))
    for batch in batches:
        model(batch).backward()       # ZeRO-2 sends gradients meanwhile
        sharded.finish()              # this rank's shard of the mean gradient is ready
        sharded.clip(1.0)
        sharded.step()                # update this rank's shard, then gather the shards of all ranks
        sharded.zero_grad()           # drop the gradients before the next step

              gradients                             parameters
    rank 0    ■ ■ ■ ■                  ■ . . .             ■ . . .                ■ ■ ■ ■
    rank 1    ■ ■ ■ ■  reduce_scatter  . ■ . .    step     . ■ . .   all_gather   ■ ■ ■ ■
    rank 2    ■ ■ ■ ■  ─────────────>  . . ■ .  ────────>  . . ■ .  ───────────>  ■ ■ ■ ■
    rank 3    ■ ■ ■ ■                  . . . ■             . . . ■                ■ ■ ■ ■

Adam keeps two numbers for every parameter. With N ranks, each rank keeps 1/N of them. A reduce_scatter followed by an
all_gather (one unit each) moves as many bytes as one all_reduce, so this saves memory without sending more. ZeRO-1
sends the gradients when backward has ended. ZeRO-2 sends those of a block as soon as they are complete, and frees them.
A message needs twice the memory of its gradients, so at most two are in transit: before a rank sends a third one, it
receives the first. With one at a time, the network would wait for each rank to compute the next gradients.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from beyond.flat_parameters import FlatParameters, Shard, decay_groups, parameters_by_block


class Bucket:
    """Parameters whose gradients travel as one message; this rank updates a shard of them.

    flat: the parameters, see flat_parameters.py. shard: this rank's part of their values.
    missing: the parameters whose gradients are not ready.
    work, outgoing, received: the handle of the message in transit, and its tensors; None if there is no message.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        """Cut the shard out of the flat parameters.

        b.6  [1] `own` is this rank's part of flat.values, in fp32, of length flat.shard_length. For fp32 parameters it
                 is a view, so that updating the shard updates the parameters; for others it is a copy.
        """
        self.flat = FlatParameters(parameters, dist.get_world_size())
        self.missing = set(parameters)
        self.work: Any = None
        self.outgoing: Tensor | None = None
        self.received: Any = None
        # TODO(cos598d) b.6: [1] take this rank's part (1-2 lines)
        # BEGIN SOLUTION b.6
        own = self.flat.values.chunk(dist.get_world_size())[dist.get_rank()].float()
        # END SOLUTION b.6
        self.shard = Shard(own, self.flat, dist.get_rank())

    def send(self) -> None:
        """Start to bring every rank its shard of all gradients, and return at once.

        b.6  [2] Take the gradients: `take_gradients` returns them as one tensor, in the order of flat.values.
             [3] Start a collective that does not wait: a reduce_scatter, or an all_to_all of the N shards. Keep the
                 handle in self.work, and both tensors until it is done. A reduce_scatter adds in the dtype of its
                 tensors: give it fp32.
        """
        # TODO(cos598d) b.6: [2] and [3] take the gradients and start to send them (about 3 lines)
        # BEGIN SOLUTION b.6
        self.outgoing = self.flat.take_gradients()
        self.received = torch.empty_like(self.outgoing)
        self.work = dist.all_to_all_single(self.received, self.outgoing, async_op=True)
        # END SOLUTION b.6

    def receive(self) -> None:
        """Wait for the message, and add the mean over all ranks to the gradient of this rank's shard.

        b.6  [4] Wait. Release what was sent (set it to None), so that its memory is free for the mean. Compute the mean
                 over all ranks of this rank's shard, in fp32.
             [5] Store this mean as shard.gradient. If there is already one from an earlier micro-batch, add the mean
                 to it.
             [6] Release what has arrived and the handle, too: messages need as much memory as ZeRO saves on gradients.
        """
        # TODO(cos598d) b.6: [4] to [6] wait, add the mean, release the messages (about 5 lines)
        # BEGIN SOLUTION b.6
        self.work.wait()
        self.outgoing = None
        mean = self.received.view(dist.get_world_size(), -1).mean(dim=0, dtype=torch.float32)
        self.shard.gradient = mean if self.shard.gradient is None else self.shard.gradient + mean
        self.work = self.received = None
        # END SOLUTION b.6


class ShardedOptimizer:
    """An optimizer whose state is divided among the ranks, and the exchange of gradients that belongs to it.

    model: the same module with the same values on every rank. Afterwards its parameters are views of flat tensors.
    blocks: the parameters of each of these modules travel together; all parameters outside of them do so, too.
    make_optimizer: parameter groups -> torch optimizer. weight_decay: for matrices; biases and norms do not decay.
    stage: 1 sends all gradients in finish(), 2 sends during backward.

    Attributes
    buckets: one for each block, in the order in which they are sent; checkpoint.py knows them as `pieces`.
    bucket_of: parameter -> its bucket. next_bucket: index of the first bucket that has not been sent in this step.
    optimizer: the torch optimizer that updates the shards.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        make_optimizer: Callable[[list[dict]], Optimizer],
        weight_decay: float = 0.0,
        stage: int = 2,
    ) -> None:
        *of_blocks, root = parameters_by_block(model, blocks)
        in_order = [*of_blocks[::-1], root]  # backward begins with the last block and ends with the embeddings
        self.buckets = self.pieces = [Bucket(parameters) for parameters in in_order if parameters]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.flat.parameters}
        self.next_bucket = 0
        self.optimizer = make_optimizer(decay_groups([bucket.shard for bucket in self.buckets], weight_decay))
        if stage == 2:
            for trained in self.bucket_of:
                trained.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: Parameter) -> None:
        """The hook of ZeRO-2: backward calls it as soon as parameter.grad is complete.

        b.6  [7] Remove the parameter from its bucket's `missing`. Send the next bucket if nothing is missing in it any
                 more, then the one after it, and so on, as in b.4: all ranks send in the same order.
        """
        # TODO(cos598d) b.6: [7] note that the gradient is ready, then send what is complete (3-4 lines)
        # BEGIN SOLUTION b.6
        self.bucket_of[parameter].missing.remove(parameter)
        while self.next_bucket < len(self.buckets) and not self.buckets[self.next_bucket].missing:
            self.send_next()
        # END SOLUTION b.6

    def send_next(self) -> None:
        """Send the next bucket, so that at most two messages are in transit.

        b.6  [8] If two buckets are in transit, receive the older one: it had time to travel while backward computed two
                 buckets. Without this step, all messages are in memory when backward ends.
             [9] Send the next bucket, and count it in next_bucket.
        """
        # TODO(cos598d) b.6: [8] and [9] receive the older message, send the next bucket (about 4 lines)
        # BEGIN SOLUTION b.6
        if self.next_bucket >= 2:
            self.buckets[self.next_bucket - 2].receive()
        self.buckets[self.next_bucket].send()
        self.next_bucket += 1
        # END SOLUTION b.6

    def finish(self) -> None:
        """Send the remaining buckets, and receive what is left: every shard has its gradient, and parameters have none.

        With M micro-batches in a step, ZeRO-2 calls it after every backward, ZeRO-1 after the last one: ZeRO-2 then
        sends M + 1 units in a step.
        """
        while self.next_bucket < len(self.buckets):
            self.send_next()
        for bucket in self.buckets:
            if bucket.work is not None:  # still in transit
                bucket.receive()
            bucket.missing = set(bucket.flat.parameters)
        self.next_bucket = 0

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most max_norm; return the norm before scaling."""
        return clip_shards([bucket.shard for bucket in self.buckets], max_norm)

    def step(self) -> None:
        """Update this rank's shards, then copy the shards of all ranks to every rank.

        b.7  [3] Update the shards: self.optimizer.step().
             [4] For every bucket, start an all_gather of the shards into flat.values that does not wait. All tensors
                 of an all_gather have the dtype of flat.values.
             [5] Only then wait for all of them, so that they travel at the same time.
        """
        # TODO(cos598d) b.7: [3] to [5] update the shards, then gather them all (about 7 lines)
        # BEGIN SOLUTION b.7
        self.optimizer.step()
        handles = []
        for bucket in self.buckets:
            values = bucket.flat.values
            own = bucket.shard.values.to(values.dtype, copy=True)  # a copy: the shard may be a view of what is written
            handles.append(dist.all_gather_single(values, own, async_op=True))
        for handle in handles:
            handle.wait()
        # END SOLUTION b.7

    def zero_grad(self) -> None:
        """Drop the gradients of the shards, before the next step."""
        for bucket in self.buckets:
            bucket.shard.gradient = None


def clip_shards(shards: Sequence[Shard], max_norm: float) -> Tensor:
    """Scale the gradients of the shards of all ranks so that their common norm is at most max_norm.

    Returns the norm before scaling, a tensor without dimensions, the same on every rank. The factor is that of torch's
    clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.

    b.7  [1] A rank knows only its shards. Add up the squares of their gradients, and sum the result over all ranks.
         [2] Scale the gradients in place.
    """
    # TODO(cos598d) b.7: [1] and [2] compute the norm of all ranks, and scale (about 6 lines)
    # BEGIN SOLUTION b.7
    gradients = [shard.gradient for shard in shards if shard.gradient is not None]
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for gradient in gradients:
        gradient *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm
    # END SOLUTION b.7
