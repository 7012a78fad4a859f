"""Storages that the grader keeps for the ranks of a run: names and bytes, as in an object store.

An operation arrives like a collective of one rank, and is answered at once. So the grader knows every operation, in its
order, and nobody has to be believed; from these orders, crash_states.py computes what a crash could leave.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from grader.ranks.calls import Call

FULL = b"full"  # the answer to a put that finds no space


class Storages:
    """`contents` has each storage as name -> bytes. `full`: see Request."""

    def __init__(self, contents: Sequence[Mapping[str, bytes]] = (), full: tuple[int, int] | None = None) -> None:
        self.contents = [dict(content) for content in contents]
        self.full = full
        self._puts: Counter[int] = Counter()

    def answer(self, call: Call) -> bytes:
        """Carry out an operation and return its answer: the value of a get (b"" if there is none), a list's names."""
        content, key = self.contents[call.data["storage"]], call.data["key"]
        if call.name == "put":
            self._puts[call.rank] += 1
            if self.full and self.full[0] == call.rank and self._puts[call.rank] >= self.full[1]:
                call.data["full"] = True
                return FULL
            call.data["value"] = content[key] = call.payload or b""
        elif call.name == "delete":
            content.pop(key, None)
        elif call.name == "get":
            return content.get(key, b"")
        else:
            return "\n".join(sorted(name for name in content if name.startswith(key))).encode()
        return b""
