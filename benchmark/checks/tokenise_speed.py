"""How fast text becomes token blocks: from files to a finished folder, against the tokenizers library on its own.

    python -m benchmark.checks.tokenise_speed [--input FILE_OR_FOLDER...] [--tokenizer gpt2|tiny|PATH]
        [--rounds 11] [--quick]

The library gets the same batches, already read and in memory, with the same number of threads, and its result is thrown
away; ours reads, checks, tokenises, writes and hashes. Both run in turns within a round, so that they meet the same
machine; the figures are medians over the rounds of the ratio within a round (above 1: ours is faster). Then the time
to open the finished folder. The last line is one JSON object; the exit code is 0 only if both promises are kept.

Without --input: OSCAR text and GPT-2's tokenizer below $COS598D_DATA if that is set, else the embedded sample and tiny.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.data.oscar import BLOCK_SIZE, VALIDATION, describe, load_blocks
from common.data.oscar_text import find_files, read_documents
from common.data.sample_data import oscar_sample_file
from common.data.tokenise import make_batches, text_only, tokenise
from common.errors import exit_on_input_error
from common.models.load import load_tokenizer

RATIO_AT_LEAST = 0.9
OPEN_AT_MOST = 0.2  # seconds
ENOUGH = 3_000_000  # bytes: less text is read several times over, as a start costs some milliseconds whatever follows


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_round(files: list[Path], batches: list[list[str]], tokenizer: Any) -> dict[str, float]:
    """Seconds that each of the four takes, one after the other."""
    backend = tokenizer.backend_tokenizer
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "blocks")
        options: dict[str, Any] = {"size": None, "block_size": BLOCK_SIZE, "validation": VALIDATION}
        ours = seconds(lambda: tokenise(read_documents(files), describe(files), tokenizer, folder, **options))
        with text_only(backend):
            fast = seconds(lambda: [backend.encode_batch_fast(batch, add_special_tokens=False) for batch in batches])
            plain = seconds(lambda: [backend.encode_batch(batch, add_special_tokens=False) for batch in batches])
        opened = seconds(lambda: load_blocks(folder, tokenizer, 64))
    return {"ours": ours, "encode_batch_fast": fast, "encode_batch": plain, "open": opened}


def measure(files: list[Path], tokenizer: object, rounds: int) -> dict[str, float]:
    """Median ratios of the library's time to ours, and the median time to open the folder in seconds."""
    batches = list(make_batches(read_documents(files)))
    one_round(files, batches, tokenizer)  # to warm up: the library keeps words it has met
    results = []
    for turn in range(rounds):
        results.append(one_round(files, batches, tokenizer))
        print(f"round {turn + 1:2}: " + ", ".join(f"{name} {value:.3f} s" for name, value in results[-1].items()))
    return {
        "ratio": statistics.median(result["encode_batch_fast"] / result["ours"] for result in results),
        "ratio_to_encode_batch": statistics.median(result["encode_batch"] / result["ours"] for result in results),
        "open_seconds": statistics.median(result["open"] for result in results),
    }


def main() -> None:
    data = Path(os.environ["COS598D_DATA"]) if os.environ.get("COS598D_DATA") else None
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--input", nargs="+", type=Path, default=[data / "oscar" if data else oscar_sample_file()])
    parser.add_argument("--tokenizer", default=str(data / "tokenizers" / "gpt2") if data else "tiny")
    parser.add_argument("--rounds", type=int, default=11, help="turns of the comparison (default: 11)")
    parser.add_argument(
        "--quick", action="store_true", help="smallest sizes, takes seconds; time limits are not checked"
    )
    arguments = parser.parse_args()
    files = find_files(arguments.input)
    if arguments.quick:
        arguments.rounds = 1
    else:
        size = sum(file.stat().st_size for file in files)
        files = files * max(1, -(-ENOUGH // max(1, size)))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {arguments.rounds} rounds, {len(files)} files\n")
    result = measure(files, load_tokenizer(arguments.tokenizer, "gpt2"), arguments.rounds)
    print(f"\nspeed over encode_batch_fast, the library's fastest: {result['ratio']:.2f} (at least {RATIO_AT_LEAST})")
    print(f"speed over encode_batch, its usual call: {result['ratio_to_encode_batch']:.2f}")
    print(f"a finished folder opens in {result['open_seconds']:.3f} s (at most {OPEN_AT_MOST} s)")
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))
    fast = result["ratio"] >= RATIO_AT_LEAST and result["open_seconds"] <= OPEN_AT_MOST
    sys.exit(0 if fast or arguments.quick else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
