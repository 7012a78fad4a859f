"""Signatures on what a rank sends: a message counts only if the grader's own code in the rank has made it.

A rank gets two keys with its job, one for calls and events, one for its last word. Each key is a local of a generator:
no attribute, closure or frame of ours leads to it, and `guard` refuses a student's code the generator's frame. Bytes
that somebody else writes to the line carry no signature, and end the run as tampering.

A student's code can hold an object of ours and call its methods, also with an object of its own as `self`, or let C
code call them (a property, functools.partial, map). So a message is made only where one of our functions calls for it
by its name, and where each of our methods on the way has one of our objects as `self`, see `strange_frame`.
"""

import _thread
import dis
import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Protocol

from grader.wire import values
from grader.wire.values import SIGNATURE, MessageError

LINE, ENDING = 0, 1  # which key
GRADER = str(Path(__file__).resolve().parents[1]) + os.sep
BY_HAND = "calls the grader's process group by hand"
OWN_METHOD = "a process group's own method"  # where torch.distributed's functions were not called
ASKS_BY_HAND = "asks for a permit by hand, and not by calling a partition"
ENTERED = frozenset({"forward", "leave"})  # our functions that torch calls when a partition is called
FORGED = "sends a message of the grader's that was made outside of the grader"
TOLD: Mapping[str, frozenset[str]] = MappingProxyType({  # kinds of messages, and the names by which our code calls
    "event": frozenset({"event", "tell", "send"}), "ask": frozenset({"ask", "_ask", "send"}),
    "own": frozenset({"own", "send"}),
})  # fmt: skip
CALLS = frozenset(number for name, number in dis.opmap.items() if name.startswith("CALL"))
JOINING = (GRADER + "wire/connection.py", GRADER + "inside/join_group.py")
CACHE = dis.opmap.get("CACHE", 0)  # follows an instruction; a frame can be there while it calls

Signer = Generator[Exception | None, dict | None, None]


class Site(Protocol):
    """What call_sites.Sites is."""

    def __call__(self, frame: FrameType | None) -> tuple[str, str]: ...

    def students(self, filename: str) -> str: ...

    def calls_modules(self, filename: str) -> bool: ...

    def is_collective(self, frame: FrameType) -> bool: ...


def new_keys() -> tuple[bytes, bytes]:
    return secrets.token_bytes(32), secrets.token_bytes(32)


def sign(data: bytes, key: bytes, number: int) -> bytes:
    """Of the number-th message under this key, so that none can be left out or sent again."""
    return hashlib.blake2b(data, digest_size=SIGNATURE, key=key, salt=number.to_bytes(16, "big")).digest()


def end_of_notes(key: bytes) -> str:
    """The last line of what the guard in a rank notes: without it somebody has closed the pipe, or filled it."""
    return sign(b"notes", key, 0).hex()


class Verifier:
    """The grader's side: which key has signed the next message."""

    def __init__(self, keys: tuple[bytes, bytes]) -> None:
        self.keys, self.counts = keys, [0, 0]

    def open(self, tag: bytes, data: bytes) -> int:
        """LINE or ENDING. Raises MessageError where neither has."""
        for which, key in enumerate(self.keys):
            if secrets.compare_digest(tag, sign(data, key, self.counts[which] + 1)):
                self.counts[which] += 1
                return which
        raise MessageError("the message has no valid signature, so it is not from the grader's code in the rank")


def signer(
    send: Callable[[bytes], None], key: bytes, site: Site, replaced: Callable[[], str],
    note: Callable[[str, str], None], ours: frozenset[int],
) -> Signer:  # fmt: skip
    """A primed generator: `.send(message)` signs and sends, and returns the error if it refuses.

    It adds where the call came from (file:line, inside what) by itself, and looks at its callers: they are frames of
    the grader's. `replaced` names a function of ours that was exchanged; `ours`: see audit.identities.
    """
    idents = _thread.get_ident, _thread.get_native_id  # the second is not given to a later thread again
    primed = _signing(send, key, site, replaced, note, ours, sys._getframe, *idents, sign, values.pack)
    next(primed)
    return primed


def _signing(
    send: Callable[[bytes], None], key: bytes, site: Site, replaced: Callable[[], str],
    note: Callable[[str, str], None], ours: frozenset[int], getframe: Any, ident: Any, native: Any, sign: Any,
    pack: Any,
) -> Signer:  # fmt: skip
    """What it uses are its own locals: exchanging a name in a module changes nothing here."""
    number, wire, folder = 0, GRADER + "wire/connection.py", GRADER
    main, look, made, by_hand = ident(), strange_frame, list[type](), asks_by_hand
    own_method, of_ours = OWN_METHOD, is_for_a_group_of_ours
    answer: Exception | None = None
    while True:
        frame = strange = message = data = None  # a generator that waits must not keep a student's objects alive
        message = yield answer
        frame = getframe(1)
        answer = None
        kind, wanted = (message["kind"], message.get("what")) if message else ("", "")
        while frame and frame.f_code.co_filename == wire:
            frame = frame.f_back
        joins = kind == "call" and message is not None and message["name"] == "init_process_group"
        if not frame or not frame.f_code.co_filename.startswith(folder):
            strange = frame or getframe(1)
        else:
            strange = look(getframe(1), "join" if joins else kind, ours, made)
        if strange:
            note(FORGED, f"{strange.f_code.co_filename}:{strange.f_lineno}")
            answer = RuntimeError(FORGED)
        elif name := replaced():
            note(f"replaces {name}", "")
            answer = RuntimeError(f"{name} of the grader was replaced")
        elif kind == "ask" and wanted == "permit" and by_hand(frame, site):
            while frame and not site.students(frame.f_code.co_filename):
                frame = frame.f_back
            note(ASKS_BY_HAND, f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "")
            answer = RuntimeError(ASKS_BY_HAND)
        elif message and kind == "own":
            made.append(message["type"])
        else:
            try:
                if message and kind in ("call", "event"):
                    message["where"], message["inside"] = site(getframe(1))
                if message and kind == "ask":
                    message["thread"] = 0 if ident() == main else native()
                if kind == "call" and not joins:
                    while frame and frame.f_code.co_filename.startswith(folder):
                        frame = frame.f_back
                    if frame and message and not (site.is_collective(frame) and of_ours(frame, ours)):
                        message["inside"] = message["inside"] or own_method
                    if frame and site.students(frame.f_code.co_filename):  # and not torch.distributed
                        note(BY_HAND, f"{frame.f_code.co_filename}:{frame.f_lineno}")
                data = pack(message)
                number += 1
                send(sign(data, key, number) + data)
            except Exception as error:  # a generator that raises is gone, and the rank could not even say so
                answer = error


def asks_by_hand(frame: FrameType | None, site: Site, folder: str = GRADER, entered: frozenset[str] = ENTERED) -> bool:
    """Whether the grader's frames from here on do not begin where torch calls a partition."""
    last = ""
    while frame and frame.f_code.co_filename.startswith(folder):
        last, frame = frame.f_code.co_name, frame.f_back
    return not (frame and last in entered and site.calls_modules(frame.f_code.co_filename))


def is_for_a_group_of_ours(frame: FrameType, ours: frozenset[int]) -> bool:
    """Whether a function of torch.distributed was given one of our groups, or none for the default one. An attribute
    of a student's group can be C code that does anything while torch looks it up."""
    group = frame.f_locals.get("group")
    return group is None or id(type(group)) in ours


def strange_frame(
    frame: FrameType | None, kind: str, ours: frozenset[int], made: list[type],
    folder: str = GRADER, told: Mapping[str, frozenset[str]] = TOLD, calls: frozenset[int] = CALLS, cache: int = CACHE,
    joining: tuple[str, str] = JOINING,
) -> FrameType | None:  # fmt: skip
    """The first frame that shows that a message was not made as the grader makes it; None for none.

    frame: the innermost one. `ours` and `made`: the types of the grader's objects, by identity, and the globals of its
    functions. A property or an iterator of a student's that our code meets is called where no call is written.
    """
    names = told.get(kind)
    while frame and (code := frame.f_code).co_filename.startswith(folder) and code.co_name != "live":
        if id(frame.f_globals) not in ours or (kind == "join" and code.co_filename not in joining):
            return frame
        kind = "" if code.co_filename == joining[-1] else kind  # who calls join.py is a student or a probe
        if code.co_argcount and code.co_varnames[0] == "self":
            kept = type(frame.f_locals.get("self"))
            if id(kept) not in ours and not any(kept is other for other in made):
                return frame.f_back or frame
        if names and code.co_name not in names:  # our function that calls for the message
            place, instructions = frame.f_lasti, code.co_code
            while place and instructions[place] == cache:
                place -= 2
            if instructions[place] not in calls or names.isdisjoint(
                (*code.co_names, *code.co_freevars, *code.co_varnames)
            ):
                return frame
            names = None
        frame = frame.f_back
    return frame if names else None
