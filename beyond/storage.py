"""What a checkpoint is saved to, and what is saved. This code is given.

An object store such as S3 has four operations: put, get, delete and list. A put is whole or not there at all; there is
no rename and no append. `Folder` offers the same operations on a folder of a file system:

    storage = Folder("runs/survive/checkpoints")
    storage.put("step00000003/shard0", {"values": tensor})
    storage.list("step00000003/")                      # ["step00000003/shard0"]
    storage.get("step00000003/shard0")["values"]
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from common.paths import atomic_write


class Storage(Protocol):
    """Names and values, which all ranks share. A name is a text without a line break; `/` has no meaning of its own."""

    def put(self, name: str, value: Any) -> None:
        """Store what torch.save can write, in place of what the name had before. After a crash in between, the name has
        the old value or the new one. Raises OSError if the storage is full."""

    def get(self, name: str) -> Any:
        """Return the value. Raises FileNotFoundError if there is none."""

    def delete(self, name: str) -> None:
        """Remove a name; nothing happens if it is not there."""

    def list(self, prefix: str = "") -> list[str]:
        """Return all names that begin with `prefix`, sorted."""


class Folder:
    """A storage in a folder that all ranks can reach: on one machine, or on a network file system."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def put(self, name: str, value: Any) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "wb") as file:  # a temporary file beside it, at the end os.replace
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())  # before the rename: after a power failure, the name must not lead to an empty file
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)  # the rename itself
        os.close(directory)

    def get(self, name: str) -> Any:
        return torch.load(self.folder / name, map_location="cpu", mmap=True)  # only what is used is read

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def list(self, prefix: str = "") -> list[str]:
        files = (path for path in self.folder.rglob("[!.]*") if path.is_file())  # no temporary files
        names = (path.relative_to(self.folder).as_posix() for path in files)
        return sorted(name for name in names if name.startswith(prefix))


@dataclass
class State:
    """What a run needs to continue.

    step: updates so far.
    shards: name -> this rank's part of a flat tensor: "values", and the optimizer's moments, such as "exp_avg". A
        tensor of L elements is padded with zeros to a multiple of N, the number of ranks, and cut into N equal parts.
    lengths: name -> L, the elements of the whole tensor without padding.
    data: what is the same on every rank: the place in the data, with "seed", "epoch" and "position".
    """

    step: int
    shards: dict[str, Tensor]
    lengths: dict[str, int]
    data: dict[str, Any] = field(default_factory=dict)
