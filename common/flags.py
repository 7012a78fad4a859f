"""Helpers for command lines: a parser with one-line errors, types of values, and checks."""

import argparse
import re
from collections.abc import Mapping
from typing import NoReturn, TypeVar

from common.errors import InputError

Value = TypeVar("Value")

LARGEST_SEGMENT = 65536  # bytes that TCP hands to an interface as one packet, headers not included


def whole_number(text: str) -> int:
    """Return the integer in `text`, which may be written as 3 or as 3.0."""
    if float(text) != int(float(text)):
        raise ValueError(text)
    return int(float(text))


whole_number.__name__ = "whole number"  # argparse puts this name into its message


def positive(text: str) -> int:
    """Return the integer in `text`, from 1 on."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


positive.__name__ = "whole number above 0"


def true_or_false(text: str) -> bool:
    """Return the truth value of a word; bool("False") would be True."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    return words[text.lower()] if text.lower() in words else _refuse(text)


def link_rate(text: str) -> float:
    """Return the bits per second of a rate in tc's words: 1gbit, 100mbit, 2.5gbit, 56kbit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    rate = float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] if match else 0.0
    if not rate:
        raise argparse.ArgumentTypeError(f"expected a rate such as 1gbit or 100mbit, got {text!r}")
    return rate


def burst_bytes(rate: float) -> int:
    """Return how many bytes an emulated link of `rate` bits per second lets through at full speed after a pause.

    It is what the link carries in 2 ms, and at least one segment as large as TCP makes. Larger packets are cut.
    """
    return max(LARGEST_SEGMENT, int(rate / 8 * 0.002))


def _refuse(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line; the full usage would push that line off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the flags)\n")


def or_default(value: Value | None, default: Value) -> Value:
    """Return the value of a flag, or the default if the user left the flag out."""
    return default if value is None else value


def check_at_least(flags: object, least: int, *names: str) -> None:
    """Raises InputError unless these attributes of `flags` are at least `least`."""
    for name in names:
        if not getattr(flags, name) >= least:
            raise InputError(f"--{name}: expected {least} or more, got {getattr(flags, name)}")


def integer_of(environment: Mapping[str, str], name: str, default: int, flag: str = "") -> int:
    """Return the whole number in a variable of the environment, `default` if it is not set.

    flag: the flag that wins over the variable, if there is one.
    Raises InputError for any other text, such as the tcp://10.0.0.1:80 that Kubernetes puts into MASTER_PORT.
    """
    if name not in environment:
        return default
    text = environment[name]
    if not text.strip().isdecimal():
        advice = f"unset it, or pass {flag}" if flag else "unset it"
        raise InputError(f"{name} in the environment: expected a whole number, got {text!r}; {advice}")
    return int(text)


def add_memory_limit(parser: argparse.ArgumentParser) -> None:
    """Add the flag that common/peak_memory.py enforces."""
    parser.add_argument(
        "--memory_limit_mb", type=positive, metavar="N",
        help="end with an error if model and training take more than N MB on a worker; the steps take longer",
    )  # fmt: skip
