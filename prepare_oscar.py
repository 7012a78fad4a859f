"""Makes a folder of token blocks from OSCAR text, for --data_dir of the GPT-2 scripts.

    python prepare_oscar.py --input en_meta/ --size 100MB --output oscar-100MB
    python prepare_oscar.py --input notes.txt more.jsonl.zst --tokenizer tiny --block_size 128 --output notes
    python prepare_oscar.py --hub en --output oscar-100MB

What is read: common/data/oscar_text.py; what is written: common/data/token_folder.py.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import os
from pathlib import Path

from common.data.oscar_text import find_files, hub_files, parse_size, read_documents
from common.errors import InputError, exit_on_input_error


def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    size = parse_size(arguments.size)
    # Here: they load torch and transformers, and a wrong flag is reported first.
    from common.cache import cached
    from common.data.oscar import describe
    from common.data.token_folder import make_request, read_manifest, write_folder
    from common.models.load import load_tokenizer

    tokenizer = load_tokenizer(arguments.tokenizer, "gpt2")
    files: list[str | Path]
    if arguments.hub:
        files = [hub_files(arguments.hub)]
        sources = [{"name": str(files[0]), "bytes": None, "modified": None}]
    else:
        paths = find_files(arguments.input)
        files, sources = [*paths], describe(paths)
    request = make_request(sources, tokenizer, size, arguments.block_size, arguments.validation)
    output = arguments.output.absolute()
    exists = _check_output(output)
    if exists and not arguments.overwrite:
        manifest = read_manifest(output)
        if manifest.request != request:
            raise InputError(
                f"{arguments.output}: was made from other text or with other settings; name another folder, or replace "
                "it with --overwrite"
            )
        print(f"{arguments.output}: {manifest} (made earlier from the same input)")
        return
    _make_parent(output)

    def build(partial: Path) -> None:
        write_folder(partial, read_documents(files), tokenizer, request)

    print(f"{arguments.output}: {read_manifest(cached(output, build, fresh=True))}")


def _make_parent(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(output.parent, os.W_OK):
            raise PermissionError(f"no permission to write into {output.parent}")
    except OSError as error:
        raise InputError(f"{output}: cannot be written ({error}); name another folder") from error


def _check_output(output: Path) -> bool:
    """Return whether there are token blocks to keep or to replace. Raises InputError for anything else."""
    from common.cache import COMPLETE
    from common.data.oscar import is_made

    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    ours = {"train.bin", "validation.bin", "manifest.json", COMPLETE}
    if not is_made(output) or not {path.name for path in output.iterdir()} <= ours:
        raise InputError(f"{output}: expected a new name, got a path that holds no token blocks; name another folder")
    return True


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python prepare_oscar.py", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", type=Path, help="files or folders: .jsonl or text, also .zst or .gz")
    source.add_argument("--hub", metavar="LANGUAGE", help="stream OSCAR 23.01 from the hub, for instance: en")
    add("--output", type=Path, required=True, help="folder to create")
    add("--size", default="100MB", help="most text to read: 100MB, 64KiB, 250000 or all (default: 100MB)")
    names = ("--tokenizer", "--tokenizer_name")  # the second as the task scripts call it
    add(*names, default="gpt2", help="gpt2, tiny, another hub name or a folder (default: gpt2)")
    add("--block_size", type=int, default=1024, help="tokens in a training block (default: 1024)")
    add("--validation", type=float, default=0.05, help="fraction of the documents for validation (default: 0.05)")
    add("--overwrite", action="store_true", help="replace token blocks that were made from other text or settings")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_on_input_error(main)
