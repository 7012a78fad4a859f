"""Makes a folder of token blocks from OSCAR text, for --data_dir of the GPT-2 scripts.

    python prepare_oscar.py --input en_meta/ --size 100MB --output oscar-100MB
    python prepare_oscar.py --input notes.txt more.jsonl.zst --tokenizer tiny --block_size 128 --output notes
    python prepare_oscar.py --hub en --output oscar-100MB

What is read: common/data/oscar_text.py; what is written: common/data/token_map.py.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
from pathlib import Path

from common.data.oscar import BLOCK_SIZE, VALIDATION, describe, summary
from common.data.oscar_text import HUB_FILES, find_files, hub_documents, parse_size, read_documents
from common.data.tokenise import tokenise
from common.errors import exit_on_input_error


def main(argv: list[str] | None = None) -> None:
    arguments = _parse(argv)
    size = parse_size(arguments.size)
    from common.models.load import load_tokenizer  # here: it loads transformers, and a wrong flag is reported first

    tokenizer = load_tokenizer(arguments.tokenizer, "gpt2")
    if arguments.hub:
        documents = hub_documents(arguments.hub)
        sources = [{"name": HUB_FILES.format(language=arguments.hub), "bytes": None, "modified": None}]
    else:
        files = find_files(arguments.input)
        documents, sources = read_documents(files), describe(files)
    manifest, is_new = tokenise(
        documents,
        sources,
        tokenizer,
        arguments.output,
        size=size,
        block_size=arguments.block_size,
        validation=arguments.validation,
        overwrite=arguments.overwrite,
    )
    print(f"{arguments.output}: {summary(manifest)}" + ("" if is_new else " (made earlier from the same input)"))


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
    add("--block_size", type=int, default=BLOCK_SIZE, help=f"tokens in a training block (default: {BLOCK_SIZE})")
    add(
        "--validation",
        type=float,
        default=VALIDATION,
        help=f"fraction of the documents for validation (default: {VALIDATION})",
    )
    add("--overwrite", action="store_true", help="replace token blocks that were made from other text or settings")
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_on_input_error(main)
