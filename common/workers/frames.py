"""Asks a thread's frame what it runs. In a file that a student may change, that would look like tampering."""

from collections.abc import Callable
from types import FrameType

Frame = FrameType | None


def runs(frame: Frame, function: Callable) -> bool:
    """Return whether a thread is in this function; `frame` is its innermost one."""
    return frame is not None and frame.f_code is function.__code__


def self_of(frame: FrameType) -> object:
    """Return the object whose method a frame runs."""
    return frame.f_locals["self"]


def name_in_stack(function: Callable) -> tuple[str, str]:
    """Return the file and the name with which a function appears in a stack."""
    return function.__code__.co_filename, function.__code__.co_name
