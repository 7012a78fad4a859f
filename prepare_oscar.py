"""Makes a folder of token blocks from OSCAR text, for --data_dir of the GPT-2 scripts.

    python prepare_oscar.py --input en_meta/ --size 100MB --output oscar-100MB
    python prepare_oscar.py --input notes.txt more.jsonl.zst --tokenizer tiny --output notes
    python prepare_oscar.py --hub en --output oscar-100MB

What is read: common/data/oscar_text.py; what is written: common/data/oscar.py.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from common.data.oscar_text import find_files, hub_files, parse_size
from common.errors import InputError, exit_on_input_error


def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    size = parse_size(arguments.size)
    # Here: they load torch and transformers, and a wrong flag is reported first.
    from common.cache import cached
    from common.data.oscar import write_folder
    from common.models.load import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer, "gpt2")
    files: Sequence[str | Path] = [hub_files(arguments.hub)] if arguments.hub else find_files(arguments.input)
    output = arguments.output.absolute()
    _check_output(output, arguments.overwrite)

    def build(partial: Path) -> None:
        print(f"{arguments.output}: {write_folder(partial, files, tokenizer, size)}")

    cached(output, build, fresh=True)


def _check_output(output: Path, overwrite: bool) -> None:
    """Raise InputError unless `output` can be made, or holds token blocks that are to be replaced."""
    from common.cache import COMPLETE
    from common.data.oscar import is_made

    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        ours = {"train.bin", "validation.bin", "manifest.json", COMPLETE}
        if not is_made(output) or not {path.name for path in output.iterdir()} <= ours:
            raise InputError(f"{output}: expected a new name, got a path that holds no token blocks; name another")
        if not overwrite:
            raise InputError(f"{output}: exists already; pass it as --data_dir, or replace it with --overwrite")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"{output}: no permission to write into {output.parent}; name another folder")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python prepare_oscar.py", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", type=Path, help="files or folders: .jsonl or text, also compressed")
    source.add_argument("--hub", metavar="LANGUAGE", help="stream OSCAR 23.01 from the hub, for instance: en")
    add("--output", type=Path, required=True, help="folder to create")
    add("--size", default="100MB", help="most text to read: 100MB, 64KiB, 250000 or all (default: 100MB)")
    names = ("--tokenizer", "--tokenizer_name")  # the second as the task scripts call it
    add(*names, default="gpt2", help="gpt2, tiny, another hub name or a folder (default: gpt2)")
    add("--overwrite", action="store_true", help="replace token blocks that were made from other text or settings")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_on_input_error(main)
