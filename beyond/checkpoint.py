"""Save the shards of all ranks, and resume from them with any number of ranks. This code is given.

    FOLDER/shard0_of_4.pt ... shard3_of_4.pt     one file per rank, written by torch.save

Each file has a list with one dictionary per bucket or block, in the order of `pieces`:

    "sizes"     the number of elements of every parameter, in the order of FlatParameters.parameters
    "tensors"   name -> tensor of length L: "values", and the optimizer's tensors, such as "exp_avg", all in fp32
    "numbers"   name -> number, such as "step"

Concatenated, the shards form the flat tensor: sum(sizes) elements, then zeros that fill up the last shard.
So with a different number of ranks, the flat tensor is only cut in different places.
"""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from beyond.flat_parameters import FlatParameters, Shard
from common.errors import InputError
from common.paths import atomic_write


class Entry(TypedDict):
    """What a rank's file has of one piece."""

    sizes: list[int]
    tensors: dict[str, Tensor]
    numbers: dict[str, object]


class Piece(Protocol):
    """A Bucket or a ShardedBlock."""

    flat: FlatParameters
    shard: Shard


class Sharded(Protocol):
    """A ShardedOptimizer or a ShardedModel."""

    pieces: Sequence[Piece]
    optimizer: Optimizer


def save_shards(folder: Path, sharded: Sharded) -> None:
    """Write this rank's file. Every rank calls it; the checkpoint is complete when all of them have returned.

    Raises InputError if the file cannot be written.
    """
    state = [_state_of(piece, sharded.optimizer) for piece in sharded.pieces]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f"shard{dist.get_rank()}_of_{dist.get_world_size()}.pt", "wb") as file:
            torch.save(state, file)
    except OSError as error:
        raise InputError(f"checkpoint {folder}: cannot write it: {error.strerror or error}") from error


def load_shards(folder: Path, sharded: Sharded) -> None:
    """Set shards, parameters and optimizer state from a checkpoint of any number of ranks. Every rank calls it.

    Raises InputError if files are missing or damaged, or if the checkpoint belongs to another model.
    """
    saved = [_read(file) for file in _files(folder)]
    sizes = [piece.flat.sizes for piece in sharded.pieces]
    if any([entry["sizes"] for entry in state] != sizes for state in saved):
        raise InputError(f"checkpoint {folder}: its parameters differ from this model's in size or order")
    for i, piece in enumerate(sharded.pieces):
        shards = [state[i]["tensors"] for state in saved]
        whole = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
        _set_state(piece, sharded.optimizer, whole, saved[0][i]["numbers"])


def _read(file: Path) -> list[Entry]:
    try:
        return torch.load(file, map_location="cpu", mmap=True)  # what is not needed stays in the file
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"checkpoint {file}: cannot read it ({type(error).__name__}); save it again") from error


def _files(folder: Path) -> list[Path]:
    """Return the files of one checkpoint, in the order of the ranks that wrote them."""
    first_shards = sorted(folder.glob("shard0_of_*.pt"))
    if len(first_shards) != 1:
        raise InputError(f"checkpoint {folder}: expected one file shard0_of_N.pt, found {len(first_shards)}")
    count = int(first_shards[0].stem.removeprefix("shard0_of_"))
    files = [folder / f"shard{rank}_of_{count}.pt" for rank in range(count)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise InputError(f"checkpoint {folder}: {', '.join(missing)} missing; copy the files of all {count} ranks")
    return files


def _state_of(piece: Piece, optimizer: Optimizer) -> Entry:
    """Return one entry of this rank's file."""
    states = [optimizer.state[part] for part in piece.shard.parts]
    tensors, numbers = {"values": piece.shard.values.clone()}, {}
    for name, value in states[0].items():
        if isinstance(value, Tensor) and value.dim() == 1:
            tensors[name] = torch.cat([state[name] for state in states])
        else:
            numbers[name] = value
    return {"sizes": piece.flat.sizes, "tensors": tensors, "numbers": numbers}


def _set_state(piece: Piece, optimizer: Optimizer, whole: dict[str, Tensor], numbers: dict[str, object]) -> None:
    """Cut the flat tensors for this number of ranks, and put this rank's shard into place."""
    flat, shard = piece.flat, piece.shard
    length = flat.shard_length
    lengths = [len(part) for part in shard.parts]
    own_tensors = {}
    for name, tensor in whole.items():
        padded = torch.zeros(length * dist.get_world_size())
        padded[: sum(flat.sizes)] = tensor[: sum(flat.sizes)]
        own_tensors[name] = padded[dist.get_rank() * length :][:length].to(shard.values.device, copy=True)
        if name == "values" and flat.values.untyped_storage().nbytes():  # not with ZeRO-3, which has freed this memory
            flat.values.copy_(padded)
    shard.values.copy_(own_tensors.pop("values"))
    for i, part in enumerate(shard.parts):
        tensors = {name: tensor.split(lengths)[i] for name, tensor in own_tensors.items()}
        copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in numbers.items()}
        optimizer.state[part] = tensors | copies
