"""Runs one stage of a pipeline over send and recv, in the order that a schedule gives. This code is given.

    stage 0          stage 1          last stage
    embeddings  ──>  blocks     ──>   blocks, norm, head  ──> loss         forward: activations (B, T, D) to the right
                <──             <──                                        backward: their gradients to the left

NCCL carries out the sends and receives of two ranks in a group one after another: if both ranks of a pair begin with a
receive, or both with a send, neither ever ends. So messages to a higher rank use the pipeline group and messages to a
lower rank the group of all ranks: in each of the two, one rank only sends and the other only receives. Messages in one
direction arrive in the order in which they were sent; with a correct schedule, they are needed in that order.

The first message between two ranks in a group makes NCCL connect them, and each of the two stops there until the other
one comes to it. Stages begin a schedule with different messages, so all pairs are connected before the first step.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter, functional

from beyond.one_f_one_b import Action

Group = dist.ProcessGroup | None  # None: the group of all ranks


class Stage(nn.Module):
    """A part of a GPT2LMHeadModel: consecutive blocks, the embeddings on the first stage, norm and head on the last.

    The head's matrix is the embedding's. With several stages, the first and the last each have a copy; their gradients
    must be added before the update, see StageRunner.finish.
    """

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        blocks = list(model.transformer.h)
        # Rounded up: if blocks do not divide evenly, earlier stages get one more, since the last one has the head.
        first, last = -(-stage * len(blocks) // stages), -(-(stage + 1) * len(blocks) // stages)
        self.first_block = first
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.width = model.config.n_embd
        self.blocks = nn.ModuleList(blocks[first:last])
        if self.is_first:
            self.wte, self.wpe, self.drop = model.transformer.wte, model.transformer.wpe, model.transformer.drop
        if self.is_last:
            self.ln_f, self.head = model.transformer.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T) on the first stage, otherwise activations (B, T, D) -> activations, or logits on the last."""
        if self.is_first:
            x = self.drop(self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x)) if self.is_last else x

    def shared_parameter(self) -> Parameter | None:
        """Return the matrix that the first and the last stage share, if this is one of them."""
        if self.is_first:
            return self.wte.weight  # type: ignore[no-any-return]
        return self.head.weight if self.is_last else None  # type: ignore[no-any-return]


class Message:
    """Activations (B, T, D) or their gradients that arrive from a neighbour, possibly while this rank is computing.

    tokens: the micro-batch (B, T) that they belong to. rank: the sender. group: the one that it sends in.
    """

    def __init__(self, tokens: Tensor, width: int, rank: int, group: Group) -> None:
        self.tensor = torch.empty(*tokens.shape, width, device=tokens.device)
        self.handle = dist.irecv(self.tensor, rank, group=group)

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived."""
        if self.handle is not None:
            self.handle.wait()
        return self.tensor


class StageRunner:
    """Runs one stage through a step.

    group: the pipeline group; stage i runs on its i-th rank. On GPUs it must not be the group of all ranks itself.

    Attributes: alive, the micro-batches whose activations are kept; most_alive, the largest number of them so far;
    count and bytes of the messages that this rank has sent in training.
    """

    def __init__(self, stage: Stage, group: dist.ProcessGroup) -> None:
        self.stage, self.group = stage, group
        ranks = dist.get_process_group_ranks(group)
        index = dist.get_rank(group)
        self.left = None if stage.is_first else ranks[index - 1]
        self.right = None if stage.is_last else ranks[index + 1]
        self.other_end: int | None = None  # the rank that has the shared matrix as well
        if stage.is_first != stage.is_last:
            self.other_end = ranks[-1] if stage.is_first else ranks[0]
        self.alive: dict[int, tuple[Tensor, Tensor]] = {}
        self.most_alive = 0
        self.sends: list[tuple[dist.Work | None, Tensor]] = []
        self.count = self.bytes = 0
        self.is_connected = False

    def connect(self, device: torch.device) -> None:
        """Exchange a number with each rank that gets messages from this one, the first time that it is called."""
        if self.is_connected:
            return
        self.is_connected = True
        number = torch.zeros(1, device=device)
        for rank in dict.fromkeys((self.left, self.right, self.other_end)):
            if rank is None:
                continue
            if rank > dist.get_rank():
                dist.send(number, rank, group=self.group)
                dist.recv(number, rank)
            else:
                dist.recv(number, rank, group=self.group)
                dist.send(number, rank)

    def run(self, actions: Sequence[Action], micro_batches: Sequence[Tensor]) -> Tensor:
        """Run forward and backward of all micro-batches (B, T) in the order of `actions`; gradients add up.

        Returns the mean of their losses on the last stage, 0 on the others.
        """
        self.connect(micro_batches[0].device)
        losses = []
        arriving: Message | None = None
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            message = arriving or self.expect(action, micro_batches)
            arriving = None
            # Begin to receive before computing, so that the neighbour can send without waiting for us. But do not ask
            # for the gradient of activations that are not sent yet: CUDA loads each kernel at its first use, and that
            # can wait for the receive to end, which would then never happen.
            if following is not None and (following.kind == "forward" or following.micro_batch in self.alive):
                arriving = self.expect(following, micro_batches)
            if action.kind == "forward":
                y = self.forward(action.micro_batch, micro_batches, message)
                losses.append(y.detach() if self.right is None else torch.zeros((), device=y.device))
            else:
                self.backward(action.micro_batch, message)
        self.wait_for_sends()
        return torch.stack(losses).sum()

    def only_forward(self, tokens: Tensor) -> Tensor | None:
        """Run forward on tokens (B, T) without a backward; return the logits (B, T, V) on the last stage."""
        self.connect(tokens.device)
        arriving = self.expect(Action("forward", 0), [tokens])
        y = self.stage(tokens if arriving is None else arriving.wait())
        if self.right is None:
            return y
        dist.send(y.contiguous(), self.right, group=self.group_towards(self.right))
        return None

    def expect(self, action: Action, micro_batches: Sequence[Tensor]) -> Message | None:
        """Begin to receive what an action needs: activations from the left or their gradients from the right."""
        is_forward = action.kind == "forward"
        rank, group = (self.left, self.group) if is_forward else (self.right, None)
        return None if rank is None else Message(micro_batches[action.micro_batch], self.stage.width, rank, group)

    def group_towards(self, rank: int) -> Group:
        """Return the group in which this rank sends to another one."""
        return self.group if rank > dist.get_rank() else None

    def forward(self, i: int, micro_batches: Sequence[Tensor], activations: Message | None) -> Tensor:
        tokens = micro_batches[i]
        x = tokens if activations is None else activations.wait().requires_grad_()
        y = self.stage(x)
        if self.right is None:  # each position predicts the next token
            logits = y[:, :-1].flatten(0, 1)
            y = functional.cross_entropy(logits, tokens[:, 1:].flatten()) / len(micro_batches)
        else:
            self.send(y.detach(), self.right)
        self.alive[i] = (x, y)
        self.most_alive = max(self.most_alive, len(self.alive))
        return y

    def backward(self, i: int, gradients: Message | None) -> None:
        x, y = self.alive.pop(i)
        y.backward(None if gradients is None else gradients.wait())
        if self.left is not None:
            assert x.grad is not None
            self.send(x.grad, self.left)

    def send(self, tensor: Tensor, rank: int) -> None:
        tensor = tensor.contiguous()
        handle = dist.isend(tensor, rank, group=self.group_towards(rank))
        self.sends.append((handle, tensor))  # the tensor must live until it is sent
        self.count += 1
        self.bytes += tensor.nbytes

    def wait_for_sends(self) -> None:
        for handle, _ in self.sends:
            if handle is not None:
                handle.wait()
        self.sends.clear()

    def finish(self) -> None:
        """Add the gradients of the matrix that the first and the last stage share."""
        if self.other_end is None:
            return
        shared = self.stage.shared_parameter()
        assert shared is not None and shared.grad is not None
        theirs = torch.empty_like(shared.grad)
        self.send(shared.grad, self.other_end)
        dist.recv(theirs, self.other_end, group=self.group if self.stage.is_last else None)
        self.wait_for_sends()
        shared.grad += theirs

    def shared_elsewhere(self) -> Parameter | None:
        """Return the shared matrix if this is the last stage and the first one has it too.

        The norm of all gradients uses this to leave out the second copy.
        """
        is_copy = self.stage.is_last and not self.stage.is_first
        return self.stage.shared_parameter() if is_copy else None
