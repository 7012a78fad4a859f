"""Collectives: one rank's call, what each rank passes to it, what each gets back, and when calls disagree.

Nothing here waits or sends. All arithmetic is numpy's, in the order of the ranks: every rank gets the same bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise

import numpy as np

from grader.ranks.phrases import Phrase, sentence
from grader.wire.reductions import REDUCTIONS
from grader.wire.values import Fields, MessageError, item_bytes, to_array, to_bytes

SILENTLY_WRONG = "SilentlyWrongError"  # the type of a rank's error, see grader/inside/backend.py


@dataclass
class Event:
    """Something a rank did: what a spy noted, or a call (below). A rank's events are in the order they happened."""

    name: str
    where: str  # file:line of the innermost frame in the student's tree
    inside: str  # "" if that line did it itself, else "DistributedDataParallel", "backward" or a library's module
    data: Fields
    arrived: int = field(default=0, kw_only=True)  # its place among the events of all ranks of the run


@dataclass
class Call(Event):
    """A rank's part in a collective, a send or a recv; init_process_group counts, with its arguments in `data`."""

    rank: int
    identity: int
    group: str
    members: tuple[int, ...]  # global ranks
    root: int | None  # global rank; of a send or recv: the peer
    tag: int
    reduce: str | None  # SUM, AVG, PRODUCT, MIN or MAX
    shape: tuple[int, ...]  # of one rank's tensor, also where a list of them is given
    dtype: str
    asynchronous: bool
    payload: bytes | None  # what the rank passed to it; dropped on completion unless the run keeps payloads
    sent: int  # bytes that the rank passed to it: the tensor for gather, the whole list for scatter at the root
    received: int = 0  # bytes given back, a rank's own share included
    number: int = 0  # position in the group's order of calls, from 1; of a send or recv: among its pair
    complete: bool = False
    waited: bool = True  # False: the handle was dropped, so the result never reached the tensor
    answered: bool = False
    posted_at: int = 0  # how many events its rank had then, this call included
    waited_at: int | None = None  # the same when somebody began to wait for it

    @property
    def is_empty(self) -> bool:
        """Return whether the call has no data, as a barrier: that somebody waits is all that it can tell."""
        return self.name not in ("init_process_group", MEASUREMENT, *STORAGE) and 0 in (len(self.dtype), *self.shape)

    @property
    def point_to_point(self) -> bool:
        return self.name in ("send", "recv")

    def in_transit(self, later: "Call") -> bool:
        """Return whether nobody had waited for this call yet when its rank posted `later`, or this call itself."""
        waited_before = self.waited_at is not None and self.waited_at < later.posted_at
        return self.posted_at <= later.posted_at and not waited_before

    @property
    def sequence(self) -> tuple:
        """Return the key of what `number` counts: a rank's collectives in a group, or a pair's sends (or recvs)."""
        if self.point_to_point:
            return (self.group, self.name, self.rank, self.root, self.tag)
        return (self.group, self.rank)

    @property
    def partner_sequence(self) -> tuple:
        """Return the key of the recvs that a send waits for, or the other way round."""
        return (self.group, "recv" if self.name == "send" else "send", self.root, self.rank, self.tag)

    @property
    def in_group(self) -> str:
        """Return ` in the group of ranks 0, 2` for a call in a group that new_group made, else ""."""
        name = self.group.partition(" ")[0].partition("/")[2]
        return "" if name in ("0", "join") else f" in the group of ranks {', '.join(map(str, self.members))}"

    @property
    def price(self) -> float:
        """Return the fewest bytes that a rank must send for such a call, whatever the algorithm."""
        if "sends" in self.data:  # all but what it sends to itself
            return self.sent - item_bytes(self.dtype) * self.data["sends"][self.members.index(self.rank)]
        tensor = math.prod(self.shape) * item_bytes(self.dtype) if self.dtype else 0
        return tensor * PRICES.get(self.name, lambda n: 0.0)(len(self.members))

    def sent_arrays(self) -> np.ndarray:
        """Return the payload as numbers, (tensors, *shape); only if the run keeps payloads."""
        assert self.payload is not None, "ask for it with payloads=True, see Request"
        return to_array(self.dtype, [-1, *self.shape], self.payload)


STORAGE = ("put", "get", "delete", "list")  # operations on a storage that the grader keeps, see storages.py
MEASUREMENT = "measurement"  # the grader's own barrier, at which the memory of all ranks is measured

# What each rank passes to a call, in units of its tensor: (at the root, elsewhere). n is the number of ranks.
INPUTS: dict[str, Callable[[int], tuple[int, int]]] = {
    "all_reduce": lambda n: (1, 1),
    "reduce": lambda n: (1, 1),
    "broadcast": lambda n: (1, 0),
    "gather": lambda n: (1, 1),
    "scatter": lambda n: (n, 0),
    "all_gather": lambda n: (1, 1),
    "reduce_scatter": lambda n: (n, n),  # (1, 1) with unequal parts: its unit is then the whole, as in all_to_all
    "all_to_all": lambda n: (1, 1),  # its unit is the whole: what goes to whom is in `data`
    "barrier": lambda n: (0, 0),
    "init_process_group": lambda n: (0, 0),
    MEASUREMENT: lambda n: (0, 0),
    **dict.fromkeys(STORAGE, lambda n: (1, 1)),  # of a rank alone: a put passes the value, the others nothing
    "send": lambda n: (1, 1),
    "recv": lambda n: (0, 0),
}
# The fewest bytes that a rank sends, in units of its tensor: the mean over n ranks.
PRICES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: n - 1,  # its tensor is the n-th part of what it passes to the call
    "all_gather": lambda n: n - 1,
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), lambda n: (n - 1) / n),
    "send": lambda n: 1,
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter", "send", "recv")
ARITHMETIC: dict[str, Callable] = {
    "SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum
}  # fmt: skip


def parse_call(rank: int, message: dict) -> Call:
    """Make a call of a rank's message, and check every field. Raises MessageError."""
    try:
        name, shape, dtype = message["name"], tuple(message.get("shape", ())), str(message.get("dtype", ""))
        members, payload = tuple(message["members"]), message.get("payload")
        raw = b"" if payload is None else payload.tobytes()
        root = message.get("root", message.get("peer"))
        unequal = name == "reduce_scatter" and "sends" in message
        at_root, elsewhere = (1, 1) if unequal else INPUTS[name](len(members))
        unit = math.prod(shape) * item_bytes(dtype) if dtype else 0
        if len(raw) != unit * (at_root if root in (rank, None) else elsewhere):
            raise ValueError(f"{name} of {shape} {dtype} with {len(raw)} bytes")
        if rank not in members or (name in ROOTED and root not in members):
            raise ValueError(f"rank {rank} or root {root} is not in the group {members}")
        if name in REDUCING and message["reduce"] not in REDUCTIONS:
            raise ValueError(f"no reduction {message['reduce']}")
        data = dict(message.get("join", {}))
        if name == MEASUREMENT:
            data = {"point": str(message["point"])[:200]}
        if name in STORAGE:
            data = {"storage": int(message["storage"]), "key": str(message["key"])[:200]}
        if name == "all_to_all" or unequal:
            sides = ("sends", "expects") if name == "all_to_all" else ("sends",)
            data = {side: [int(size) for size in message[side]] for side in sides}
            lengths = {len(sizes) for sizes in data.values()}
            if lengths != {len(members)} or min(map(min, data.values())) < 0 or sum(data["sends"]) != math.prod(shape):
                raise ValueError(f"{name} of {shape} in the parts {data}")
        return Call(
            name, message["where"][:200], message["inside"][:200], data,
            rank, int(message["id"]), f"{message['group']} {members}", members, root, int(message.get("tag", 0)),
            message.get("reduce"), shape, dtype, bool(message.get("async")), raw, len(raw),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"not a call: {type(error).__name__}: {error}") from None


def compute(calls: list[Call]) -> list[bytes]:
    """Return what each member of a collective gets back, in the order of the group."""
    n, name = len(calls), calls[0].name
    payloads = [call.payload or b"" for call in calls]
    at_root = [call.rank == call.root for call in calls]
    if name in ("all_reduce", "reduce"):
        result = _reduced(calls)
        return [result if name == "all_reduce" or here else b"" for here in at_root]
    if name == "broadcast":
        return [payloads[at_root.index(True)]] * n
    if name in ("scatter", "reduce_scatter"):
        whole = payloads[at_root.index(True)] if name == "scatter" else _reduced(calls)
        elements = len(whole) // item_bytes(calls[0].dtype)
        return _cut(whole, calls[0].dtype, calls[0].data.get("sends", [elements // n] * n))
    if name == "all_to_all":
        parts = [_parts(call) for call in calls]
        return [b"".join(row[i] for row in parts) for i in range(n)]
    if name in ("gather", "all_gather"):
        joined = b"".join(payloads)
        return [joined if name != "gather" or here else b"" for here in at_root]
    return [b""] * n


def _parts(call: Call) -> list[bytes]:
    """Return what a rank sends to each member in an all_to_all."""
    return _cut(call.payload or b"", call.dtype, call.data["sends"])


def _cut(whole: bytes, dtype: str, sizes: list[int]) -> list[bytes]:
    """Cut bytes into parts of these sizes, in elements."""
    ends = [item_bytes(dtype) * end for end in accumulate(sizes, initial=0)]
    return [whole[begin:end] for begin, end in pairwise(ends)]


def _reduced(calls: list[Call]) -> bytes:
    """Reduce all payloads to one; bfloat16 is added up in float32 and rounded once, at the end."""
    dtype = calls[0].dtype
    arrays = [to_array(dtype, [-1], call.payload or b"") for call in calls]
    with np.errstate(all="ignore"):
        total = reduce(ARITHMETIC[calls[0].reduce or "SUM"], arrays)
        if calls[0].reduce == "AVG":
            total = total / len(calls)
        return to_bytes(total, dtype)


def disagreement(calls: list[Call]) -> str:
    """Say in a line what the members of a collective, or a send and its recv, disagree on; "" if they agree."""
    pair = calls[0].point_to_point  # a send's root is its receiver and the other way round
    aspects: dict[str, Callable[[Call], object]] = {
        "roots": lambda call: None if pair else call.root,
        "reductions": lambda call: call.reduce,
        "shapes": lambda call: None if call.name == "all_to_all" else call.shape,
        "dtypes": lambda call: call.dtype,
        "sizes of parts": lambda call: tuple(call.data.get("sends", ())) if call.name == "reduce_scatter" else (),
        "addresses": lambda call: call.data.get("address"),
        "measurement points": lambda call: call.data.get("point"),
    }
    for aspect, value in aspects.items():
        if len({value(call) for call in calls}) > 1:
            parts = sentence(Phrase(call.rank, "calls", describe(call), call.where) for call in calls)
            advice = ""
            if aspect == "shapes":
                order = "do all ranks take the same tensors in the same order?"
                advice = "; the buffer of a recv must be as long as what is sent to it" if pair else f"; {order}"
            return f"different {aspect}: {parts}{advice}"
    if calls[0].name == "all_to_all":
        return _unequal_parts(calls)
    if calls[0].name == "init_process_group":
        size = len(calls)
        wrong = [call for call in calls if (call.data["rank"], call.data["world_size"]) != (call.rank, size)]
        if wrong:
            joins = sentence(
                Phrase(call.rank, "joins", f"as rank {call.data['rank']} of {call.data['world_size']}", call.where)
                for call in wrong
            )
            return f"{size} processes were started, but {joins}"
    return ""


def _unequal_parts(calls: list[Call]) -> str:
    """Say which member of an all_to_all expects more or fewer elements than another sends to it; "" if none does."""
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            sends, expects = sender.data["sends"][j], receiver.data["expects"][i]
            if sends != expects:
                return (
                    f"different sizes in all_to_all #{sender.number}: rank {sender.rank} sends {sends} elements to "
                    f"rank {receiver.rank} ({sender.where}), which expects {expects} from it ({receiver.where})"
                )
    return ""


def describe(call: Call) -> str:
    """Return a call in words: `scatter #2 from rank 0 of float32 (2, 3)`."""
    words = [call.name, f"#{call.number}"]
    if call.reduce:
        words.append(call.reduce)
    if call.root is not None:
        words.append(f"{'from' if call.name in ('broadcast', 'scatter', 'recv') else 'to'} rank {call.root}")
    if call.dtype:
        words.append(f"of {call.dtype} {call.shape}")
    if call.data.get("address"):
        words.append(f"at {call.data['address']}")
    return " ".join(words) + call.in_group
