"""The names of models, and lists of names and numbers on the command line. Flags are checked without loading torch."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from common.errors import InputError
from common.flags import Parser

MODELS = (
    "gpt2", "gpt2-tiny", "gpt2-24m", "llama-tiny", "llama-1b", "t5-tiny", "t5-small", "t5-large", "t5-3b", "t5-11b",
)  # fmt: skip


def command_parser(command: str, about: str | None) -> Parser:
    """The parser of a command of benchmark/; `about` is the module's docstring. A flag may be defined once more."""
    return Parser(
        prog=f"python -m benchmark.{command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        conflict_handler="resolve",
    )


def sized_gpt2(name: str) -> tuple[int, int] | None:
    """Blocks and width of a model such as gpt2-12x512; None for other names. A head has 64 numbers."""
    match = re.fullmatch(r"gpt2-([1-9]\d*)x([1-9]\d*)", name)
    return (int(match[1]), int(match[2])) if match and int(match[2]) % 64 == 0 else None


def is_own(name: str) -> bool:
    """Whether this is a function of a user's file, FILE.py:NAME; see training/own_model.py."""
    path, _, function = name.rpartition(":")
    return path.endswith(".py") and function.isidentifier()


def check_model(flag: str, name: str) -> None:
    """Raises InputError unless there is such a model: a name, the size of a GPT-2, a folder, or FILE.py:NAME."""
    if is_own(name) and not Path(name.rpartition(":")[0]).is_file():
        raise InputError(f"{flag}: there is no file {name.rpartition(':')[0]}")
    is_folder = (Path(name) / "config.json").is_file()
    if name not in MODELS and sized_gpt2(name) is None and not is_folder and not is_own(name):
        raise InputError(
            f"{flag}: expected {', '.join(MODELS)}, gpt2-BLOCKSxWIDTH with a width divisible by 64, a model's folder, "
            f"or FILE.py:NAME for a model of your own; got {name!r}"
        )


STRATEGY_FLAGS = ("--strategies", "--strategy", "--only")  # one thing; the first name is the one that we document


def add_strategies(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        *STRATEGY_FLAGS, dest="strategies", default=default, help="names separated by commas, or all (%(default)s)"
    )


def models_of(text: str) -> list[str]:
    """The models of --models."""
    for name in text.split(","):
        check_model("--models", name)
    return text.split(",")


def names_of(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """The names of a flag such as --strategies ddp,fsdp, which may be `all`."""
    words = list(known) if text == "all" else text.split(",")
    if unknown := [word for word in words if word not in known]:
        raise InputError(f"{flag}: expected names among {', '.join(known)}; got {', '.join(unknown)}")
    return words


def numbers_of(flag: str, text: str) -> list[int]:
    """The numbers of a flag such as --workers 1,2,4."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError(f"{flag}: expected positive whole numbers, such as 1,2,4; got {text!r}")
    return [int(word) for word in words]
