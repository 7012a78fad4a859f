"""What each rung of the ladder costs in a step, side by side in the same processes.

    python -m benchmark.checks.ladder_steps [--rounds 20] [--workers 2,4] [--models tiny,22M] [--quick]

The strategies are resident in the same ranks and take turns, a barrier before each step. Printed are the medians and
the ratio to DDP of the same round, with a bootstrap interval; "DDP again" is a second DDP model, so that its ratio
shows the error of the measurement. Last line of stdout: {"2": {"tiny": {"2a": ratio, ...}, ...}, ...}. Exit code 0 if
the interval of every "DDP again" holds 1: otherwise the machine was too busy for the other ratios to mean anything.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it also starts as a script, on every rank
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from benchmark.measure.intervals import interval
from common.arguments import parse_glue_arguments
from common.errors import exit_on_input_error
from common.paths import ROOT, atomic_write, import_file
from common.workers.process_group import process_group

# name -> BERT's size, examples per worker and step, tokens per example
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "tiny": ({"vocab_size": 1273, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, 16, 64),
    "22M": ({"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}, 2, 32),
}
NAMES = ("no communication", "2a gather + scatter", "2b all_reduce", "2b one flat tensor", "3 DDP", "3 DDP again")
DDP = NAMES.index("3 DDP")


def lesson(task: str):
    """The solved script of a task, as a module."""
    return import_file(ROOT / task / "run_glue.py", task)


def sync_flat(model: nn.Module, world_size: int) -> None:
    """All gradients in one tensor and one all_reduce: one message instead of one for every parameter."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size
    for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def make_step(model: nn.Module, batch: dict, sync: Callable[[], None]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(**batch).loss.backward()
        sync()
        optimizer.step()
        model.zero_grad()

    return step


def work() -> None:
    """One rank: every strategy in turn, `rounds` times; rank 0 writes the seconds (rounds, strategies) to a file."""
    name, rounds, out = sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    config = parse_glue_arguments("benchmark_ladder", ["--output_dir", str(out), *sys.argv[5:]])
    gather_scatter, all_reduce = lesson("task2a_gather_scatter"), lesson("task2b_allreduce")
    sizes, examples, tokens = MODELS[name]
    with process_group(config, all_reduce.join) as worker:
        torch.manual_seed(0)
        shape = BertConfig(**sizes, intermediate_size=4 * sizes["hidden_size"])  # and a head of two labels
        plain = BertForSequenceClassification(shape)
        batch = {"input_ids": torch.randint(5, 1000, (examples, tokens)), "labels": torch.zeros(examples).long()}
        syncs = {
            "no communication": lambda: None,
            "2a gather + scatter": lambda: gather_scatter.sync_gradients(plain, worker.world_size),
            "2b all_reduce": lambda: all_reduce.sync_gradients(plain, worker.world_size),
            "2b one flat tensor": lambda: sync_flat(plain, worker.world_size),
        }
        steps = [make_step(plain, batch, sync) for sync in syncs.values()]
        for _ in range(2):
            wrapped = DistributedDataParallel(BertForSequenceClassification(shape))
            steps.append(make_step(wrapped, batch, lambda: None))
        seconds = np.zeros((rounds + 2, len(steps)))
        for number in range(rounds + 2):
            for turn in np.random.default_rng(number).permutation(len(steps)):  # the same order on every rank
                worker.pulse.beat()
                dist.barrier()
                begin = time.perf_counter()
                steps[turn]()
                dist.barrier()  # a step ends when the slowest rank has ended it
                seconds[number, turn] = time.perf_counter() - begin
        if worker.is_first:
            with atomic_write(out / "seconds.json") as file:
                json.dump(seconds[2:].tolist(), file)  # the first two rounds warm up


def measure(name: str, workers: int, rounds: int) -> np.ndarray:
    """Seconds (rounds, strategies) of one model on `workers` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cluster.launch", "--workers", str(workers), "--", __file__]
        subprocess.run([*command, "--as_rank", name, str(rounds), folder], cwd=ROOT, check=True, stdout=sys.stderr)
        return np.array(json.loads((Path(folder) / "seconds.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--models", default="tiny,22M")
    parser.add_argument(
        "--quick", action="store_true", help="smallest sizes, takes seconds; time limits are not checked"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.workers, arguments.models = 3, "2", "tiny"
    result: dict[str, dict] = {}
    steady = True
    for workers in arguments.workers.split(","):
        for name in arguments.models.split(","):
            seconds = measure(name, int(workers), arguments.rounds)
            print(f"\n{name}, {workers} workers, {arguments.rounds} rounds: ms per step (median), ratio to DDP [95 %]")
            row = result.setdefault(workers, {}).setdefault(name, {})
            for column, strategy in enumerate(NAMES):
                ratios = seconds[:, column] / seconds[:, DDP]
                row[strategy] = round(statistics.median(ratios), 3)
                _, low, high = interval(ratios)
                steady &= strategy != "3 DDP again" or low <= 1 <= high
                median = statistics.median(seconds[:, column]) * 1e3
                print(f"  {strategy:<20} {median:8.1f}   {row[strategy]:6.2f} [{low:.2f}, {high:.2f}]", flush=True)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(json.dumps(result))
    sys.exit(0 if steady or arguments.quick else 1)


if __name__ == "__main__":
    exit_on_input_error(work if "--as_rank" in sys.argv[1:2] else main)
