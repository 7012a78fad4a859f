"""Save the state of ZeRO's shards, and resume from it, with your `save` and `load` of survive.py. This code is given.

Each bucket or block of a ShardedOptimizer or ShardedModel is a flat tensor, see flat_parameters.py, and so is each of
the optimizer's tensors. In the saved State, those of bucket 0 are "0 values", "0 exp_avg" and so on, in fp32. `data`
has the sizes of the parameters, and the optimizer's numbers, such as "step".
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from beyond.flat_parameters import FlatParameters, Shard
from beyond.storage import Folder, State
from beyond.survive import load, save
from common.errors import InputError

UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)


class Piece(Protocol):
    """A Bucket or a ShardedBlock."""

    flat: FlatParameters
    shard: Shard


class Sharded(Protocol):
    """A ShardedOptimizer or a ShardedModel."""

    pieces: Sequence[Piece]
    optimizer: Optimizer


def save_shards(folder: Path, sharded: Sharded) -> None:
    """Save a checkpoint of all ranks, which all call it. Raises InputError if it cannot be written."""
    try:
        save(Folder(folder), _state_of(sharded))
    except OSError as error:
        raise InputError(f"checkpoint {folder}: cannot write it: {error.strerror or error}") from error


def load_shards(folder: Path, sharded: Sharded) -> None:
    """Set shards, parameters and optimizer state from a checkpoint of any number of ranks. Every rank calls it.

    Raises InputError if files are missing or damaged, or if the checkpoint belongs to another model.
    """
    try:
        state = load(Folder(folder))
    except UNREADABLE as error:
        raise InputError(f"checkpoint {folder}: cannot read it ({type(error).__name__}); save it again") from error
    if state is None:
        raise InputError(f"checkpoint {folder}: expected a complete checkpoint, found none; save it again")
    if state.data["sizes"] != [piece.flat.sizes for piece in sharded.pieces]:
        raise InputError(f"checkpoint {folder}: its parameters differ from this model's in size or order")
    for i, piece in enumerate(sharded.pieces):
        own = {name.split()[1]: shard for name, shard in state.shards.items() if name.split()[0] == str(i)}
        _set_state(piece, sharded.optimizer, own, state.data["numbers"][i])


def _state_of(sharded: Sharded) -> State:
    shards: dict[str, Tensor] = {}
    lengths, numbers = {}, []
    for i, piece in enumerate(sharded.pieces):
        states = [sharded.optimizer.state[part] for part in piece.shard.parts]
        flat = {name: value for name, value in states[0].items() if isinstance(value, Tensor) and value.dim() == 1}
        own = {"values": piece.shard.values} | {name: torch.cat([state[name] for state in states]) for name in flat}
        shards |= {f"{i} {name}": tensor for name, tensor in own.items()}
        lengths |= {f"{i} {name}": sum(piece.flat.sizes) for name in own}
        numbers.append({name: value for name, value in states[0].items() if name not in flat})
    step = max(int(one.get("step", 1)) for one in numbers)
    return State(step, shards, lengths, {"sizes": [piece.flat.sizes for piece in sharded.pieces], "numbers": numbers})


def _set_state(piece: Piece, optimizer: Optimizer, own: dict[str, Tensor], numbers: dict[str, object]) -> None:
    """Put this rank's shard of a piece into place."""
    flat, shard = piece.flat, piece.shard
    shard.values.copy_(own["values"])
    if flat.values.untyped_storage().nbytes():  # not with ZeRO-3, which has freed this memory
        values = shard.values.detach().to(flat.values.dtype, copy=True)
        dist.all_gather_single(flat.values, values)
    for i, part in enumerate(shard.parts):
        tensors = {name: tensor.split(shard.lengths)[i].to(part.device, copy=True) for name, tensor in own.items()}
        copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in numbers.items()}
        tensors.pop("values")
        optimizer.state[part] = tensors | copies
