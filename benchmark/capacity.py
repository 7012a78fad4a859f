"""The largest GPT-2 that trains under a limit of memory, for every strategy: what sharding is for.

    python -m benchmark.capacity --limit_mb 600 --workers 4 [--picture beyond/capacity.png]

Each worker may take --limit_mb beyond what its process has before the model is made (common/peak_memory.py). A model
trains if benchmark.run takes three steps with it: then everything is there that a step needs. The models have blocks of
one width and differ in their number. The search begins where the prediction expects the limit; every model that is
counted has been trained, and one that is at most a twentieth larger has failed. The last line is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import sys
from functools import partial
from pathlib import Path

from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.engines.operators import compile_operators
from benchmark.measure.architecture import describe
from benchmark.names import names_of
from benchmark.predicted_memory import peak_bytes
from benchmark.strategies import STRATEGIES
from benchmark.sweep import execute
from benchmark.tables import SweepRun
from common.errors import exit_on_input_error
from common.figures import bars
from common.flags import positive
from common.paths import ROOT

COMPARED = "single,ddp,own_zero1,own_zero2,own_zero3,fsdp,tensor"
WIDTH, BATCH, LENGTH = 256, 1, 32  # of the models (4 heads); of a worker
USABLE = 0.95  # of the limit: threads and small blocks take the rest
FINEST = 20  # the search ends when the next model is larger by less than one part of so many
FOLDER = ROOT / "runs" / "benchmark" / "capacity"


def model_name(blocks: int) -> str:
    return f"gpt2-{blocks}x{WIDTH}"


def parameters(blocks: int) -> int:
    return describe(model_name(blocks), LENGTH).elements if blocks else 0


def expected(strategy: str, workers: int, limit_mb: int) -> int:
    """Blocks of the largest model that fits by the prediction, at least 1."""
    one, two = (peak_bytes(strategy, model_name(count), workers, BATCH, LENGTH) for count in (8, 16))
    return max(1, int(8 + (USABLE * limit_mb * 1e6 - one) / ((two - one) / 8)))


def trains(strategy: str, workers: int, blocks: int, limit_mb: int) -> bool:
    """Whether a model of so many blocks takes its steps; raises RuntimeError if it fails for another reason."""
    more = ["--length", str(LENGTH), "--dropped", "2", "--eval_batches", "1", "--memory_limit_mb", str(limit_mb)]
    more += ["--no_cuda", "--hang_seconds", "600"]  # 2,000 parameters as DTensors take FSDP2 minutes on a busy machine
    result = execute(SweepRun(strategy, model_name(blocks), BATCH, workers), FOLDER, 3, more)
    if "outcome" in result and "--memory_limit_mb" not in result["message"]:
        raise RuntimeError(f"{strategy}, {model_name(blocks)}: {result['message']}")
    print(f"{strategy}, {blocks} blocks: {result.get('message', 'trains')}", file=sys.stderr)
    return "outcome" not in result


def search(strategy: str, workers: int, limit_mb: int) -> Row:
    """Step up or down from the expected size until it is between a model that trains and one that does not.

    blocks: of the largest model that trains; 0 if none does. failed: of the smallest that did not.
    """
    blocks = expected(strategy, workers, limit_mb)
    fits, fails = 0, 0  # 0: not known
    while not fails or fails - fits > max(1, fits // FINEST):
        if trains(strategy, workers, blocks, limit_mb):
            fits = blocks
        else:
            fails = blocks
        step = max(1, blocks // FINEST)
        if not fails:
            blocks = fits + step
        elif not fits:
            if fails == 1:
                break
            blocks = max(1, fails - step)
        else:
            blocks = (fits + fails) // 2
    about = {"strategy": strategy, "workers": workers}
    return about | {"blocks": fits, "failed": fails, "parameters": parameters(fits)}


def largest(flags: argparse.Namespace) -> list[Row]:
    """The largest model of every strategy, and their picture."""
    compile_operators(flags.strategies, no_cuda=True)
    rows = [search(name, 1 if name == "single" else flags.workers, flags.limit_mb) for name in flags.strategies]
    title = f"{flags.limit_mb} MB on each of {flags.workers} workers"
    labels = [row["strategy"].replace("own_", "") for row in rows]
    millions = [row["parameters"] / 1e6 for row in rows]
    bars(flags.picture, labels, millions, label="parameters of the largest GPT-2, millions", title=title)
    return rows


def main() -> None:
    parser = check_parser("capacity", __doc__)
    add = parser.add_argument
    add("--limit_mb", type=positive, default=600, help="MB (10^6 bytes) for model and training on a worker (600)")
    add("--workers", type=positive, default=4, help="4; with single there is one")
    names = partial(names_of, "--strategies", known=STRATEGIES)
    add("--strategies", type=names, default=COMPARED, help="%(default)s")
    add("--picture", type=Path, default=FOLDER / "capacity.png", help="where to draw the bars (%(default)s)")
    run_parts(parser, {"largest": largest}, limit_mb=40, workers=2, strategies=["ddp", "own_zero3"])


if __name__ == "__main__":
    exit_on_input_error(main)
