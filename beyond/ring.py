"""An all_reduce built from send and recv: every rank sends to its right neighbour and receives from its left one.

          ┌──> rank 0 ──> rank 1 ──> rank 2 ──┐
          └───────────────────────────────────┘

The tensor is cut into N chunks, one per rank. Three ranks hold (a0 a1 a2), (b0 b1 b2) and (c0 c1 c2):

    b.1 reduce_scatter       chunk 0       chunk 1       chunk 2      N-1 rounds: add what you receive
            rank 0         a0 + b0 + c0     ...           ...         then chunks[rank] is the finished sum
            rank 1            ...        a1 + b1 + c1     ...
            rank 2            ...           ...        a2 + b2 + c2

    b.2 all_gather           N-1 more rounds: the finished chunks go around the ring until every rank has all of them

In every round, a rank sends one chunk and receives another one, so all N links are always busy. In total, a rank sends
2(N-1) chunks of about S/N bytes.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def reduce_scatter(flat: Tensor) -> list[Tensor]:
    """Sum `flat` over all ranks, in place; each rank ends with one chunk of the sum.

    flat: a contiguous tensor with one dimension, of the same length and dtype on every rank.

    Returns the chunks of `flat`, one per rank, in order. They are views: writing into a chunk writes into `flat`. Their
    lengths differ by at most one, so some are empty if `flat` has fewer elements than there are ranks. chunks[rank]
    holds the sum over all ranks. The other chunks hold partial sums, which are no longer needed.

    b.1  [1] Cut flat into as many chunks as there are ranks.
         [2] In each of the N-1 rounds, send one chunk to the right neighbour and receive one from the left. In round 0
             rank r sends chunk r-1 and receives chunk r-2, in round 1 it sends chunk r-2 (just received) and receives
             r-3, and so on. Chunks are counted modulo N.
         [3] Receive into a separate tensor, and add that to the chunk.
    Every rank sends and receives at the same time: if all ranks send first and receive later, all may wait forever.
    Wait for both, for the send too: until then, its message may be lost, and its chunk must not change.
    """
    # TODO(cos598d) b.1: cut flat, then N-1 rounds of send, receive and add (about 12 lines)
    # BEGIN SOLUTION b.1
    world_size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = list(flat.tensor_split(world_size))
    for step in range(world_size - 1):
        outgoing = chunks[(rank - 1 - step) % world_size]
        partial_sum = chunks[(rank - 2 - step) % world_size]
        received = torch.empty_like(partial_sum)
        both = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, received, left)]
        for transfer in dist.batch_isend_irecv(both):
            transfer.wait()
        partial_sum += received
    return chunks
    # END SOLUTION b.1


def all_gather(chunks: list[Tensor]) -> None:
    """Copy every rank's own chunk to all ranks, in place.

    chunks: one tensor per rank, as reduce_scatter returns them; chunks[i] has the same length on every rank.
    At the start, chunks[rank] is correct. Afterwards, every rank has the same values in all chunks.

    b.2  In each of the N-1 rounds, send to the right neighbour the chunk that you received last; in round 0, send your
         own, chunks[rank]. Receive the chunk whose number is one lower (modulo N) from the left neighbour, directly
         into its place. Wait for both.
    """
    # TODO(cos598d) b.2: N-1 rounds of send and receive (about 8 lines)
    # BEGIN SOLUTION b.2
    world_size, rank = dist.get_world_size(), dist.get_rank()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        incoming = chunks[(rank - step - 1) % world_size]
        both = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
        for transfer in dist.batch_isend_irecv(both):
            transfer.wait()
    # END SOLUTION b.2


def all_reduce(tensor: Tensor) -> None:
    """Replace `tensor` by its sum over all ranks; every rank ends with the same bits. Any shape, any strides."""
    flat = tensor.contiguous().view(-1)  # the tensor's own memory if that is contiguous, otherwise a copy
    all_gather(reduce_scatter(flat))
    if not tensor.is_contiguous():
        tensor.copy_(flat.view_as(tensor))


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient of `model` by its mean over all ranks: one ring for all gradients of a dtype.

    A separate ring for each parameter would send 2(N-1) small messages per parameter. A parameter without a gradient is
    left out, so it must have no gradient on any rank.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in model.parameters()):
        if gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
