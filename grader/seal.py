"""Signatures on what a rank sends: a message counts only if the grader's own code in the rank has made it.

A rank gets two keys with its job, one for calls and events, one for its last word. Each key is a local of a generator:
no attribute, closure or frame of ours leads to it, and `guard` refuses a student's code the generator's frame. Bytes
that somebody else writes to the line carry no signature, and end the run as tampering.
"""

import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from grader import values
from grader.values import SIGNATURE, MessageError

LINE, ENDING = 0, 1  # which key
GRADER = str(Path(__file__).resolve().parent) + os.sep
BY_HAND = "calls the grader's process group by hand"
FORGED = "sends a message of the grader's that was made outside of the grader"

Sealer = Generator[Exception | None, dict | None, None]


class Site(Protocol):
    """What sites.Sites is."""

    def __call__(self, frame: FrameType | None) -> tuple[str, str]: ...

    def students(self, filename: str) -> str: ...


def new_keys() -> tuple[bytes, bytes]:
    return secrets.token_bytes(32), secrets.token_bytes(32)


def sign(data: bytes, key: bytes, number: int) -> bytes:
    """Of the number-th message under this key, so that none can be left out or sent again."""
    return hashlib.blake2b(data, digest_size=SIGNATURE, key=key, salt=number.to_bytes(16, "big")).digest()


class Opener:
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


def sealer(
    send: Callable[[bytes], None], key: bytes, site: Site, replaced: Callable[[], str], note: Callable[[str, str], None]
) -> Sealer:
    """A primed generator: `.send(message)` signs and sends, and returns the error if it refuses.

    It adds where the call came from (file:line, inside what) by itself, and looks at its callers: they are frames of
    the grader's. `replaced` names a function of ours that was exchanged.
    """
    sealed = _sealed(send, key, site, replaced, note, sys._getframe, sign, values.pack)
    next(sealed)
    return sealed


def _sealed(
    send: Callable[[bytes], None], key: bytes, site: Site, replaced: Callable[[], str],
    note: Callable[[str, str], None], getframe: Any, sign: Any, pack: Any,
) -> Sealer:  # fmt: skip
    """What it uses are its own locals: exchanging a name in a module changes nothing here."""
    number, wire, join, ours = 0, GRADER + "wire.py", GRADER + "join.py", GRADER
    answer: Exception | None = None
    while True:
        frame = message = data = None  # a generator that waits must not keep a student's objects alive
        message = yield answer
        frame = getframe(1)
        answer = None
        while frame and (
            frame.f_code.co_filename == wire
            or (frame.f_code.co_name == "event" and frame.f_code.co_filename.startswith(ours))
        ):
            frame = frame.f_back
        joins = message is not None and message["kind"] == "call" and message["name"] == "init_process_group"
        if not frame or not frame.f_code.co_filename.startswith(join if joins else ours):
            note(FORGED, f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "")
            answer = RuntimeError(FORGED)
        elif name := replaced():
            note(f"replaces {name}", "")
            answer = RuntimeError(f"{name} of the grader was replaced")
        else:
            try:
                if message and message["kind"] in ("call", "event"):
                    message["where"], message["inside"] = site(getframe(1))
                if message and message["kind"] == "call" and message["name"] != "init_process_group":
                    while frame and frame.f_code.co_filename.startswith(ours):
                        frame = frame.f_back
                    if frame and site.students(frame.f_code.co_filename):  # and not torch.distributed
                        note(BY_HAND, f"{frame.f_code.co_filename}:{frame.f_lineno}")
                data = pack(message)
                number += 1
                send(sign(data, key, number) + data)
            except Exception as error:  # a generator that raises is gone, and the rank could not even say so
                answer = error
