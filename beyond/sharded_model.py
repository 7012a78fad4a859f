"""ZeRO-3, which PyTorch calls FSDP: every rank keeps a shard of each block, and gathers the rest when it needs it.

    sharded = ShardedModel(model, model.transformer.h, partial(AdamW, lr=1e-4))
    for batch in batches:
        model(batch).backward()       # hooks gather parameters, free them, and send gradients
        sharded.finish()              # this rank's shard of the mean gradient is ready
        sharded.clip(1.0)
        sharded.step()                # update this rank's shards; the next forward gathers
        sharded.zero_grad()           # drop the gradients before the next step

                          time ──>
    forward     |          | block 0      | block 1      | block 2      |
    network     | gather 0 | gather 1 |   | gather 2 |   |
    in memory     0          0, 1           1, 2           2

    backward    | block 2             | block 1             | block 0             |
    network     | gather 1 |          | send 2 | gather 0 | | send 1 |            | send 0 |
    in memory     2, 1                  1, 0                  0

Besides its shards and the root, a rank has at most two blocks in memory, the one that computes and the next one. It
has at most one message of gradients: it receives a message before it sends the next one. A step moves almost three
units of S (N-1)/N bytes instead of the two of ZeRO-2, because the blocks are gathered twice.

Parameters outside the blocks (embeddings, the last norm), and those that several blocks share, are the root. It is
gathered before forward, and freed when its gradients are complete.

Sources: Rajbhandari et al., "ZeRO", 2020, section 5.3. Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from beyond.flat_parameters import FlatParameters, Shard, decay_groups, parameters_by_block
from beyond.sharded_optimizer import clip_shards


class ShardedBlock:
    """The parameters of one block. This rank keeps a shard; the whole is in memory only while the block needs it.

    flat: the parameters, see flat_parameters.py. shard: what this rank keeps, in fp32. nbytes: size of the whole.
    gathering, own: the handle of an all_gather in transit, and what this rank sends. is_whole: flat.values may be read.
    missing: the parameters whose gradients are not ready.
    sending, outgoing, received: the handle of the message in transit, and its tensors; None if there is no message.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        """Keep the shard and free the rest.

        b.8  [1] Set the variable `own` (not self.own) to a copy of this rank's part of flat.values, in fp32, of length
                 flat.shard_length. It must not be a view: the memory of flat.values is freed.
        """
        self.flat = FlatParameters(parameters, dist.get_world_size())
        self.nbytes = self.flat.values.nbytes
        self.missing = set(parameters)
        self.gathering: dist.Work | None = None
        self.own: Tensor | None = None
        self.sending: Any = None
        self.outgoing: Tensor | None = None
        self.received: Any = None
        self.is_whole = True
        # TODO(cos598d) b.8: [1] copy this rank's part (1-2 lines)
        # BEGIN SOLUTION b.8
        own = self.flat.values.chunk(dist.get_world_size())[dist.get_rank()].to(torch.float32, copy=True)
        # END SOLUTION b.8
        self.shard = Shard(own, self.flat, dist.get_rank())
        self.free()

    def free(self) -> None:
        """Free the memory of the whole parameters.

        b.8  [2] Resize the storage of flat.values to 0 bytes (Tensor.untyped_storage, UntypedStorage.resize_): the
                 tensor and its views stay as they are, without memory. Set is_whole to False.
        """
        # TODO(cos598d) b.8: [2] free the memory of the whole (2 lines)
        # BEGIN SOLUTION b.8
        self.flat.values.untyped_storage().resize_(0)
        self.is_whole = False
        # END SOLUTION b.8

    def start_gather(self) -> None:
        """Start to gather the whole parameters, and return at once. Do nothing if they are here or on their way.

        b.8  [3] Resize the storage of flat.values to nbytes, its full size.
             [4] Start an all_gather of the shards into flat.values that does not wait; keep its handle in `gathering`.
                 The shard is sent in the dtype of flat.values; also if there is only one rank.
        """
        # TODO(cos598d) b.8: [3] and [4] get the memory back and start to gather (about 5 lines)
        # BEGIN SOLUTION b.8
        if self.is_whole or self.gathering is not None:
            return
        self.flat.values.untyped_storage().resize_(self.nbytes)
        self.own = self.shard.values.to(self.flat.values.dtype)
        self.gathering = dist.all_gather_single(self.flat.values, self.own, async_op=True)
        # END SOLUTION b.8

    def wait(self) -> None:
        """Return when the whole parameters are in memory; start the gather if that has not happened.

        b.8  [5] Start the gather if necessary, and wait for it. Set gathering to None and is_whole to True.
        """
        # TODO(cos598d) b.8: [5] start the gather if necessary, and wait for it (about 5 lines)
        # BEGIN SOLUTION b.8
        self.start_gather()
        if self.gathering is not None:
            self.gathering.wait()
        self.gathering, self.own = None, None
        self.is_whole = True
        # END SOLUTION b.8

    def send(self) -> None:
        """Start to bring every rank its shard of the gradients.

        b.10 [1] Take the gradients: `take_gradients` returns them as one tensor, in the order of flat.values.
             [2] Start a reduce_scatter (in fp32: it adds in the dtype of its tensors) or an all_to_all that does not
                 wait. Keep the handle in `sending`, and both tensors until it is done.
        """
        # TODO(cos598d) b.10: [1] and [2] take the gradients and start to send them (about 3 lines)
        # BEGIN SOLUTION b.10
        self.outgoing = self.flat.take_gradients()
        self.received = torch.empty_like(self.outgoing)
        self.sending = dist.all_to_all_single(self.received, self.outgoing, async_op=True)
        # END SOLUTION b.10

    def receive(self) -> None:
        """Wait for the message, and add the mean over all ranks to the gradient of this rank's shard.

        b.10 [3] Wait. Release what was sent (set it to None), so that its memory is free for the mean.
             [4] Add the mean over all ranks, in fp32, to shard.gradient, which may be None. Release what has arrived
                 and the handle, too.
        """
        # TODO(cos598d) b.10: [3] and [4] wait, add the mean, release the messages (about 5 lines)
        # BEGIN SOLUTION b.10
        self.sending.wait()
        self.outgoing = None
        mean = self.received.view(dist.get_world_size(), -1).mean(dim=0, dtype=torch.float32)
        self.shard.gradient = mean if self.shard.gradient is None else self.shard.gradient + mean
        self.sending = self.received = None
        # END SOLUTION b.10


class ShardedModel:
    """Shards a model's parameters, gradients and optimizer state over all ranks; you use the model itself as before.

    model: the same module with the same values on every rank. blocks: its layers, in the order in which forward uses
    them. make_optimizer: parameter groups -> torch optimizer. weight_decay: for matrices; biases and norms do not
    decay. All ranks must use the same parameters in every step. Frozen parameters stay whole on every rank.
    Raises ValueError if a block, or the rest of the model, has no trainable parameter.

    Attributes
    blocks: one ShardedBlock for each block, in order. root: the ShardedBlock of all other parameters.
    pieces: the blocks from last to first, then the root. optimizer: the torch optimizer that updates the shards.
    in_transit: the block whose gradients have been sent and not been received; empty if there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        make_optimizer: Callable[[list[dict]], Optimizer],
        weight_decay: float = 0.0,
    ) -> None:
        *of_blocks, root = parameters_by_block(model, blocks)
        if not all([*of_blocks, root]):
            raise ValueError("blocks: expected trainable parameters in each block, and some outside of all blocks")
        self.root = ShardedBlock(root)
        self.blocks = [ShardedBlock(parameters) for parameters in of_blocks]
        self.pieces = [*self.blocks[::-1], self.root]  # the order in which backward completes them
        self.in_transit = deque[ShardedBlock]()
        self.block_of = {parameter: block for block in self.pieces for parameter in block.flat.parameters}
        self.optimizer = make_optimizer(decay_groups([block.shard for block in self.pieces], weight_decay))
        model.register_forward_pre_hook(lambda module, inputs: self.before_model())
        model.register_forward_hook(lambda module, inputs, outputs: self.after_model())
        for i, block in enumerate(blocks):
            self._register(i, block)
        for trained in self.block_of:
            trained.register_post_accumulate_grad_hook(self.gradient_ready)

    def _register(self, i: int, block: nn.Module) -> None:
        block.register_forward_pre_hook(lambda module, inputs: self.before_forward(i))
        block.register_forward_hook(lambda module, inputs, outputs: self.after_forward(i))
        block.register_full_backward_pre_hook(lambda module, gradients: self.before_backward(i))

    def before_model(self) -> None:
        """Gather what forward needs first."""
        for block in (self.root, *self.blocks[:1]):
            block.start_gather()
        self.root.wait()

    def after_model(self) -> None:
        """Free the root if no backward follows. Otherwise keep it: the end of backward needs it again."""
        if not torch.is_grad_enabled():
            self.root.free()

    def before_forward(self, i: int) -> None:
        """Called before block i computes.

        b.9  [1] Wait until the block is whole.
             [2] Start to gather the next block, so that it travels while this one computes.
        """
        # TODO(cos598d) b.9: [1] and [2] wait for this block, start to gather the next (about 3 lines)
        # BEGIN SOLUTION b.9
        self.blocks[i].wait()
        if i + 1 < len(self.blocks):
            self.blocks[i + 1].start_gather()
        # END SOLUTION b.9

    def after_forward(self, i: int) -> None:
        """Called when block i has computed.

        b.9  [3] Free the block. But backward begins with the last block: it stays, unless gradients are disabled
                 (torch.is_grad_enabled).
        """
        # TODO(cos598d) b.9: [3] free the block, or keep it for backward (about 2 lines)
        # BEGIN SOLUTION b.9
        if i + 1 < len(self.blocks) or not torch.is_grad_enabled():
            self.blocks[i].free()
        # END SOLUTION b.9

    def before_backward(self, i: int) -> None:
        """Called before backward computes the gradients of block i.

        b.9  [4] Wait until the block is whole.
             [5] Start to gather the block that backward needs next.
        """
        # TODO(cos598d) b.9: [4] and [5] wait for this block, start to gather the next one (about 3 lines)
        # BEGIN SOLUTION b.9
        self.blocks[i].wait()
        if i > 0:
            self.blocks[i - 1].start_gather()
        # END SOLUTION b.9

    def gradient_ready(self, parameter: Parameter) -> None:
        """The hook: backward calls it as soon as parameter.grad is complete.

        b.10 [5] Remove the parameter from its block's `missing`. If that was the last one, send the block.
        """
        # TODO(cos598d) b.10: [5] note that the gradient is ready; send a complete block (about 4 lines)
        # BEGIN SOLUTION b.10
        block = self.block_of[parameter]
        block.missing.remove(parameter)
        if not block.missing:
            self.send(block)
        # END SOLUTION b.10

    def send(self, block: ShardedBlock) -> None:
        """Free a block and send its gradients, so that at most one message is in transit.

        b.10 [6] Free the block's parameters: backward has computed with them.
             [7] If a block is in transit, receive it: it had time to travel while backward computed this one. Without
                 this step, the messages of all blocks are in memory when backward ends.
             [8] Send this block, and add it to self.in_transit.
        """
        if block.missing and block.gathering is not None:  # it has no gradient, and its gather still writes
            block.wait()
        # TODO(cos598d) b.10: [6] to [8] free the block, receive the older message, send this one (about 5 lines)
        # BEGIN SOLUTION b.10
        block.free()
        if self.in_transit:
            self.in_transit.popleft().receive()
        block.send()
        self.in_transit.append(block)
        # END SOLUTION b.10

    def finish(self) -> None:
        """Wait until every shard has its gradient. Call it after every backward: M micro-batches move about 3 M units.

        b.10 [9] Send the blocks that have not been sent because one of their parameters got no gradient, in the order
                 of self.pieces: something is still missing in them.
             [10] Receive the block that is still in transit. Then all parameters of every block are missing again.
        """
        # TODO(cos598d) b.10: [9] and [10] send the rest, receive the last, prepare the next step (about 7 lines)
        # BEGIN SOLUTION b.10
        for block in self.pieces:
            if block.missing:
                self.send(block)
        while self.in_transit:
            self.in_transit.popleft().receive()
        for block in self.pieces:
            block.missing = set(block.flat.parameters)
        # END SOLUTION b.10

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm is at most max_norm; return the norm before scaling."""
        return clip_shards([block.shard for block in self.pieces], max_norm)

    def step(self) -> None:
        """Update this rank's shards; the next forward gathers the new values."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients of the shards, before the next step."""
        for block in self.pieces:
            block.shard.gradient = None
