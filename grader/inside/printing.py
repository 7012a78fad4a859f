"""A rank's stdout and stderr: each line is written at once, until it is too much; then printing costs nothing."""

import io
import os
import sys

_KEPT: list[io.TextIOBase] = []  # print() of Python 3.11 crashes if its sys.stdout is replaced and gone as it writes
LIMIT = 200_000  # characters, twice what the grader keeps: so it sees that something was left out


class Stream(io.TextIOWrapper):
    """Writes line by line, so a crash loses nothing, and drops all beyond LIMIT: a million lines help nobody."""

    def __init__(self, descriptor: int, name: str, endless: bool = False) -> None:
        file = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
        super().__init__(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self._name, self._left = name, sys.maxsize if endless else LIMIT
        _KEPT.append(self)
        self._nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open for the life of the process)

    def write(self, text: str) -> int:
        self._left -= len(text)
        if self._left >= 0:
            return super().write(text)
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._nowhere)
        return len(text)
