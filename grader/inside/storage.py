"""A rank's end of a storage that the grader keeps, with the operations of an object store."""

import errno
import io
import os
from typing import Any

import numpy as np
import torch

from grader.wire.connection import Wire


class BrokeredStorage:
    """put, get, delete and list, as beyond/storage.py describes them."""

    def __init__(self, wire: Wire, rank: int, number: int) -> None:
        self._wire, self._rank, self._number = wire, rank, number

    def put(self, name: str, value: Any) -> None:
        file = io.BytesIO()
        torch.save(value, file)
        if self._ask("put", name, file.getvalue()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    def get(self, name: str) -> Any:
        data = self._ask("get", name)
        if not data:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return torch.load(io.BytesIO(data))

    def delete(self, name: str) -> None:
        self._ask("delete", name)

    def list(self, prefix: str = "") -> list[str]:
        names = self._ask("list", prefix).decode()
        return names.split("\n") if names else []

    def _ask(self, operation: str, name: str, value: bytes = b"") -> bytes:
        if not isinstance(name, str) or len(name) > 200 or "\n" in name:
            raise ValueError(f"a name in a storage is a text of at most 200 characters in one line, got {name!r:.99}")
        fields = {
            "group": f"storage/{self._number}",
            "members": [self._rank],
            "storage": self._number,
            "key": name,
            "shape": [len(value)],
            "dtype": "uint8",
            "payload": np.frombuffer(value, np.uint8) if value else None,
        }
        return bytes(self._wire.answer(self._wire.post(operation, fields, waits=True), announced=True).numpy())
