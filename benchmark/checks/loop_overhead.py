"""What the task script's loop costs over a bare PyTorch loop on the same batches.

    python -m benchmark.checks.loop_overhead [--rounds 15] [--steps 20] [--quick]

Both train the tiny BERT on the sample from the same weights, in turns within one process, so that a machine whose
speed drifts slows both. Last line of stdout: {"ratio": median of the rounds' ratios, ...}; exit code 0 if the losses
are equal and the ratio is at most 1.02.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import contextlib
import copy
import io
import json
import statistics
import sys
import tempfile
import time
from types import ModuleType

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from common.arguments import parse_glue_arguments
from common.config import GlueConfig
from common.data.glue import GlueData, load_glue
from common.errors import exit_on_input_error
from common.models.load import load_tokenizer
from common.optim import set_seed
from common.paths import ROOT, import_file
from common.record import Record
from common.workers.process_group import Worker

LIMIT = 1.02


def load_task() -> ModuleType:
    return import_file(ROOT / "task1_single" / "run_glue.py", "task1_run_glue")


def house(task: ModuleType, config: GlueConfig, model, data: GlueData) -> tuple[float, list[float]]:
    """Seconds and losses of the lesson's own train(), its printing included (into memory)."""
    torch.manual_seed(1)
    record = Record(config, Worker())
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        begin = time.perf_counter()
        task.train(config, Worker(), model, data, record)
        seconds = time.perf_counter() - begin
    return seconds, record.losses


def bare(config: GlueConfig, model, data: GlueData) -> tuple[float, list[float]]:
    """The same steps in a dozen lines, printing the loss as well."""
    torch.manual_seed(1)
    losses = []
    with contextlib.redirect_stdout(io.StringIO()):
        begin = time.perf_counter()
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(config.seed)).tolist()
        loader = DataLoader(data.train, sampler=order, batch_size=config.per_gpu_train_batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, config.max_steps)
        model.train()
        for batch, _ in zip(loader, range(config.max_steps), strict=False):
            loss = model(**batch).loss
            loss.backward()
            clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            losses.append(loss.item())
            print("loss", losses[-1])
        seconds = time.perf_counter() - begin
    return seconds, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--quick", action="store_true", help="smallest sizes, takes seconds; time limits are not checked"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 2, 3
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--do_train", "--max_steps", str(arguments.steps), "--output_dir", folder]
        config, task = parse_glue_arguments("task1_single", flags), load_task()
        data = load_glue(config, load_tokenizer(config.tokenizer_name, "bert"))
        set_seed(config.seed)
        model = task.load_model(config)
        rounds = []
        for number in range(arguments.rounds + 1):
            runs = [
                lambda: house(task, config, copy.deepcopy(model), data),
                lambda: bare(config, copy.deepcopy(model), data),
            ]
            if number % 2:  # whoever comes second finds warm caches: take turns
                second, first = runs[1](), runs[0]()
            else:
                first, second = runs[0](), runs[1]()
            if number:  # round 0 warms up
                rounds.append((first[0], second[0]))
            equal = first[1] == second[1]
    ratios = sorted(one / other for one, other in rounds)
    ratio = statistics.median(ratios)
    milliseconds = [statistics.median(column) / arguments.steps * 1e3 for column in zip(*rounds, strict=True)]
    print(f"task script {milliseconds[0]:.2f} ms, bare loop {milliseconds[1]:.2f} ms per iteration (medians)")
    print(f"ratio of each round: median {ratio:.4f}, from {ratios[0]:.4f} to {ratios[-1]:.4f}; losses equal: {equal}")
    print(json.dumps({"ratio": ratio, "rounds": len(ratios), "losses_equal": equal, "torch": torch.__version__}))
    sys.exit(not (equal and (arguments.quick or ratio <= LIMIT)))


if __name__ == "__main__":
    exit_on_input_error(main)
