"""The order in which NCCL carries out messages: which ranks wait forever.

ProcessGroupNCCL has a first-in, first-out queue for every pair of ranks of a group, for single sends and receives, and
one for the whole group, for a batch (`batch_isend_irecv`), whose members run together. The first entries of two queues
meet if one sends and the other receives; a large send does not end before.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Key = tuple[Any, ...]  # the group, and the pair of ranks if it is not a batch


@dataclass
class Transfer:
    """A call: its queue, and the messages that are not done, as (is a send, the other rank)."""

    key: Key
    messages: list[tuple[bool, int]]


@dataclass
class Program:
    """What a rank does, in order: it starts a Transfer, or waits for one. Stands for torch.distributed."""

    rank: int
    steps: list[tuple[str, Transfer]] = field(default_factory=list)

    def start(self, key: Key, messages: list[tuple[bool, int]]) -> "Handle":
        self.steps.append(("start", Transfer(key, messages)))
        return Handle(self, self.steps[-1][1])

    def one(self, is_send: bool) -> Callable[..., Any]:
        def call(tensor: object, peer: int, group: Any = None) -> Handle:
            return self.start((group, min(self.rank, peer), max(self.rank, peer)), [(is_send, peer)])

        call.__name__ = "isend" if is_send else "irecv"
        return call

    def batch(self, messages: Sequence[Any]) -> "list[Handle]":
        """Stand for batch_isend_irecv."""
        return [self.start((None,), [(one.op.__name__ == "isend", one.peer) for one in messages])]


@dataclass
class Handle:
    program: Program
    transfer: Transfer

    def wait(self) -> None:
        self.program.steps.append(("wait", self.transfer))


def stuck(programs: Sequence[Program]) -> list[str]:
    """Return "rank r at step s of t" for each rank that never ends; none if all messages arrive."""
    queues: dict[tuple[int, Key], deque[Transfer]] = {}
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for program in programs:
            while at[program.rank] < len(program.steps):
                kind, transfer = program.steps[at[program.rank]]
                if kind == "wait" and transfer.messages:
                    break
                if kind == "start":
                    queues.setdefault((program.rank, transfer.key), deque()).append(transfer)
                at[program.rank] += 1
                moved = True
        for (rank, key), queue in queues.items():
            for is_send, peer in list(queue[0].messages) if queue else []:
                others = queues.get((peer, key))
                if others and (not is_send, rank) in others[0].messages:
                    queue[0].messages.remove((is_send, peer))
                    others[0].messages.remove((not is_send, rank))
                    moved = True
        for queue in queues.values():
            while queue and not queue[0].messages:
                queue.popleft()
    left = {rank for (rank, _), queue in queues.items() if queue}
    return [
        f"rank {program.rank} at step {at[program.rank]} of {len(program.steps)}"
        for program in programs
        if at[program.rank] < len(program.steps) or program.rank in left
    ]
