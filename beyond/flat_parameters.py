"""Several parameters as one flat tensor, which divides evenly among the ranks. This code is given.

    flat      | c_attn.weight | c_proj.weight | c_fc.weight | ... | ln_1.weight | c_attn.bias | ... | 0 0 |
    ranks     |        rank 0          |          rank 1          |           rank 2                      |

Rank r owns the elements r L to (r+1) L, its shard, where L is the length of flat divided by the number of ranks. So one
message serves all parameters, and a shard may begin in the middle of a parameter. Matrices come first, biases and norms
after them. So every shard consists of at most two parts: matrices, which decay, then biases and norms, which do not.
The zeros at the end fill up the last shard.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter


def parameters_by_block(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[Parameter]]:
    """Return the trainable parameters of each block, and those of the root as the last list; each parameter once.

    The root has what is in no block (embeddings, the last norm), and what several blocks share.
    Raises ValueError if a list has parameters of several dtypes: one message has one dtype.
    """
    owners: dict[Parameter, set[int]] = {p: set() for p in model.parameters() if p.requires_grad}
    for i, block in enumerate(blocks):
        for parameter in block.parameters():
            if parameter.requires_grad:
                owners[parameter].add(i)
    lists: list[list[Parameter]] = [[] for _ in range(len(blocks) + 1)]
    for parameter, indices in owners.items():
        lists[indices.pop() if len(indices) == 1 else -1].append(parameter)
    for i, parameters in enumerate(lists):
        dtypes = {str(parameter.dtype) for parameter in parameters}
        if len(dtypes) > 1:
            name = f"block {i}" if i < len(blocks) else "the root"
            raise ValueError(f"the parameters of {name} have several dtypes, {', '.join(sorted(dtypes))}: expected one")
    return lists


class FlatParameters:
    """Parameters of one dtype, as views of one flat tensor.

    parameters: matrices first. values: all their values; the `data` of every parameter is a view of it.
    shard_length: L. decayed: the number of elements of the matrices.
    """

    def __init__(self, parameters: Sequence[Parameter], world_size: int) -> None:
        self.parameters = sorted(parameters, key=lambda parameter: parameter.dim() < 2)  # keeps the order otherwise
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.decayed = sum(parameter.numel() for parameter in self.parameters if parameter.dim() >= 2)
        self.shard_length = -(-sum(self.sizes) // world_size)
        first = self.parameters[0]
        device = first.deferred.device if first.is_meta else first.device  # type: ignore[attr-defined]
        self.values = torch.zeros(self.shard_length * world_size, dtype=first.dtype, device=device)
        for parameter, piece in zip(self.parameters, self.pieces(self.values), strict=True):
            if parameter.is_meta:
                self._write_own(parameter, piece)
            else:
                piece.copy_(parameter.data)
            parameter.data = piece

    def _write_own(self, parameter: Parameter, piece: Tensor) -> None:
        """Write this rank's part of a parameter that was built without memory; see deferred.py."""
        begin = dist.get_rank() * self.shard_length - piece.storage_offset()
        begin, end = max(begin, 0), min(begin + self.shard_length, piece.numel())
        if begin < end:
            parameter.deferred.write(piece.view(-1), begin, end)  # type: ignore[attr-defined]
        torch.utils.swap_tensors(parameter, Parameter(piece.new_empty(0)))  # the same object, on another device

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Return views of `flat` in the parameters' shapes; the zeros at the end are left out."""
        pieces = flat[: sum(self.sizes)].split(self.sizes)
        return [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    def take_gradients(self) -> Tensor:
        """Return all gradients as one new tensor with the layout of `values`, and set them to None.

        A parameter without a gradient counts as zeros: other ranks may have one.
        """
        gradients = [self.values.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.parameters]
        padding = self.values.new_zeros(self.values.numel() - sum(self.sizes))
        for parameter in self.parameters:
            parameter.grad = None
        return torch.cat([*gradients, padding])


class Shard:
    """The part of flat parameters that one rank keeps and updates.

    values: (L,) in fp32. parts: the same memory as two parameters for an optimizer, the matrices' elements and the
    rest; one of them may be empty.
    """

    def __init__(self, values: Tensor, flat: FlatParameters, rank: int) -> None:
        matrices = min(max(flat.decayed - rank * flat.shard_length, 0), flat.shard_length)
        self.values = values
        self.lengths = [matrices, flat.shard_length - matrices]
        self.parts = [Parameter(part) for part in values.split(self.lengths)]
        self._gradient: Tensor | None = None

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of `values`, (L,) in fp32, or None. Setting it also sets those of `parts`, as views."""
        return self._gradient

    @gradient.setter
    def gradient(self, gradient: Tensor | None) -> None:
        self._gradient = gradient
        pieces = [None, None] if gradient is None else gradient.split(self.lengths)
        for part, piece in zip(self.parts, pieces, strict=True):
            part.grad = piece


def decay_groups(shards: Sequence[Shard], weight_decay: float) -> list[dict]:
    """Return parameter groups for an optimizer: matrices decay, biases and norms do not."""
    matrices, rest = zip(*(shard.parts for shard in shards), strict=True)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
