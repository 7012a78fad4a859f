"""What our own tools cost beside the plain way: each row lets a few things take turns and compares them.

    python -m benchmark.checks.timings [--only loop,record,pipe,ladder] [--rounds 15]

loop       task 1's script beside a bare PyTorch loop that reads and tokenizes by itself: equal losses, ratio
record     a whole run with --timeline beside one without, CPU seconds; what a Record without a timeline adds to a step
pipe       a step of the pipe beside what two cores can do, and beside torch.distributed.pipelining
ladder     one step of 2a, 2b, one flat tensor and DDP, in the same ranks; "DDP again" is the measurement's own error

Each row runs in ranks of its own. Printed are medians, and the ratio to the row's first entry within a round with its
bootstrap interval. Exit code 0 if every ratio and share that has a limit is within it. --quick takes seconds and judges
no times. The last line of stdout is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import contextlib
import copy
import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.checks.pipeline_speed import pipe
from benchmark.checks.ranks import on_ranks
from benchmark.measure.intervals import ratio
from benchmark.measure.turns import Step, Timed, take_rounds
from common.arguments import parse_glue_arguments
from common.config import RunConfig
from common.data.glue import load_glue
from common.data.sample_data import glue_sample_dir
from common.errors import exit_on_input_error
from common.flags import positive
from common.models.load import load_tokenizer
from common.optim import set_seed
from common.paths import ROOT, import_file
from common.record import Record
from common.workers.process_group import Worker

LABELS = {"entailment": 0, "not_entailment": 1}


def measure(config: RunConfig, name: str, rounds: int, quick: bool) -> list[Row]:
    """Let the steps of a comparison take turns: medians, ratios to the first within a round, and other shares."""
    timed = COMPARISONS[name][0](config, Worker(config.rank, config.world_size), quick)
    seconds = take_rounds(list(timed.steps.values()), rounds, meet=dist.barrier, clock=timed.clock)
    rows: list[Row] = []
    for column, what in zip(seconds.T, timed.steps, strict=True):
        middle = ratio(column, seconds[:, 0])
        is_inside = quick or within(middle[0], timed.limits.get(what))
        rows.append({"what": what, "ms": 1e3 * float(np.median(column)), "ratio [95 %]": middle, "holds": is_inside})
    for what, share in timed.shares(seconds).items():
        rows.append({"share": what, "value": share, "holds": quick or within(share, timed.limits[what])})
    is_equal = timed.equal()
    return [*rows, {"losses or outcomes": "equal" if is_equal else "different", "holds": is_equal}]


def lesson(task: str) -> Any:
    """The solved script of a task, as a module."""
    return import_file(ROOT / task / "run_glue.py", f"lesson_{task}")


def within(value: float, limits: tuple[float, float] | None) -> bool:
    return limits is None or limits[0] <= value <= limits[1]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def loop(here: RunConfig, worker: Worker, quick: bool) -> Timed:
    """Both train the tiny BERT on the sample from the same weights. The bare loop shares no code with the task."""
    words = ["--do_train", "--max_steps", "3" if quick else "20", "--output_dir", str(here.output_dir / "loop")]
    config, task = parse_glue_arguments("task1_single", words), lesson("task1_single")
    tokenizer = load_tokenizer(config.tokenizer_name, "bert")
    data, rows = load_glue(config, tokenizer), read_pairs(tokenizer, config.max_seq_length)
    set_seed(config.seed)
    model, losses = task.load_model(config), dict[str, list[float]]()

    def house() -> None:
        torch.manual_seed(1)
        record = Record(config, worker)
        with silent():
            task.train(config, worker, copy.deepcopy(model), data, record)
        losses["house"] = record.losses

    def bare() -> None:
        torch.manual_seed(1)
        step_losses, own_model = [], copy.deepcopy(model)
        order = torch.randperm(len(rows["labels"]), generator=torch.Generator().manual_seed(config.seed)).tolist()
        loader: DataLoader = DataLoader(range(len(order)), sampler=order, batch_size=config.per_gpu_train_batch_size)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(own_model.parameters(), lr=config.learning_rate, weight_decay=0.0)
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, int(config.num_train_epochs * len(loader)))
        own_model.train()
        for chosen, _ in zip(loader, range(config.max_steps), strict=False):
            loss = own_model(**{name: values[chosen] for name, values in rows.items()}).loss
            loss.backward()
            clip_grad_norm_(own_model.parameters(), config.max_grad_norm)
            optimizer.step()
            scheduler.step()
            own_model.zero_grad()
            step_losses.append(loss.item())
        losses["bare"] = step_losses

    return Timed(
        {"bare loop": bare, "task script": house},
        {"task script": (0, 1.02)},
        equal=lambda: losses["bare"] == losses["house"],
    )


def read_pairs(tokenizer: Any, length: int) -> dict[str, torch.Tensor]:
    """The sample's training examples, read and tokenized without the course's code."""
    text = (glue_sample_dir() / "train.tsv").read_text("utf-8").rstrip("\n")
    header, *rows = [line.split("\t") for line in text.split("\n")]
    columns = [[row[n] for row in rows] for n, name in enumerate(header) if name.startswith("sentence")]
    features = tokenizer(*columns, max_length=length, padding="max_length", truncation=True, return_tensors="pt")
    return {**features, "labels": torch.tensor([LABELS[row[-1]] for row in rows])}


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def record(config: RunConfig, worker: Worker, quick: bool) -> Timed:
    """Whole runs of task 2b on two ranks; and an empty loop's Record: an upper bound of what it adds to a step."""
    steps, folder = 200 if quick else 2000, config.output_dir
    words = ["--max_steps", str(steps), "--output_dir", str(folder / "empty")]
    empty = Record(parse_glue_arguments("task1_single", words), worker)
    loader, begin = [torch.zeros(1)] * steps, 0.0
    with silent():
        for _ in empty.epochs(loader):
            begin = time.process_time()
            for _ in empty.iterations(loader):
                for name in ("forward", "backward", "communication", "optimizer"):
                    with empty.phase(name):
                        pass
            off = (time.process_time() - begin) / steps
    script = ["task2b_allreduce/run_glue.py", "--output_dir", str(folder / "run"), "--overwrite_output_dir"]
    script += ["--max_steps", "6" if quick else "40", "--do_train"]

    def run(*more: str) -> None:
        command = [sys.executable, "-m", "cluster.launch", "--workers", "2", "--", *script, *more]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    def shares(seconds: np.ndarray) -> dict[str, float]:
        step = json.loads((folder / "run" / "rank0.json").read_text())["seconds_per_iteration"]
        return {"record without a timeline": off / step}

    limits = {"--timeline": (0.0, 1.03), "record without a timeline": (0.0, 0.01)}
    return Timed({"without": run, "--timeline": lambda: run("--timeline")}, limits, cpu_of_children, shares=shares)


def ladder(config: RunConfig, worker: Worker, quick: bool) -> Timed:
    """One step of each strategy of the ladder, and its ratio to a step of DDP."""
    width, layers, vocabulary, examples, tokens = (64, 2, 1273, 16, 64) if quick else (384, 6, 30522, 2, 32)
    shape = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )  # fmt: skip
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(5, 1000, (examples, tokens)), "labels": torch.zeros(examples).long()}
    plain = BertForSequenceClassification(shape)
    tasks = [lesson("task2a_gather_scatter"), lesson("task2b_allreduce")]

    def step_of(model: nn.Module, sync: Step) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            worker.pulse.beat()
            model(**batch).loss.backward()
            sync()
            optimizer.step()
            model.zero_grad()

        return step

    def flat() -> None:
        """One message instead of one for every parameter."""
        gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
        whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(whole)
        pieces = (whole / worker.world_size).split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, pieces, strict=True):
            gradient.copy_(mean.view_as(gradient))

    ddp = [step_of(DistributedDataParallel(BertForSequenceClassification(shape)), lambda: None) for _ in range(2)]
    return Timed(
        {
            "3 DDP": ddp[0],
            "3 DDP again": ddp[1],
            "no communication": step_of(plain, lambda: None),
            "2a gather + scatter": step_of(plain, lambda: tasks[0].sync_gradients(plain, worker.world_size)),
            "2b all_reduce": step_of(plain, lambda: tasks[1].sync_gradients(plain, worker.world_size)),
            "2b one flat tensor": step_of(plain, flat),
        },
        {"3 DDP again": (0.95, 1.05)},
    )


# Name -> what takes turns, and in how many ranks; None: in --workers.
COMPARISONS: dict[str, tuple[Callable[[RunConfig, Worker, bool], Timed], int | None]] = {
    "loop": (loop, 1), "record": (record, 1), "pipe": (pipe, 2), "ladder": (ladder, None),
}  # fmt: skip


def compare(name: str, flags: argparse.Namespace) -> list[Row]:
    ranks = COMPARISONS[name][1] or flags.workers
    return on_ranks(measure, ranks, name=name, rounds=flags.rounds, quick=flags.quick)[0]  # type: ignore[no-any-return]


def main() -> None:
    parser = check_parser("checks.timings", __doc__)
    parser.add_argument("--rounds", type=positive, default=15, help="turns of each (%(default)s)")
    parser.add_argument("--workers", type=positive, default=2, help="ranks of ladder (%(default)s)")
    run_parts(parser, {name: partial(compare, name) for name in COMPARISONS}, rounds=1)


if __name__ == "__main__":
    exit_on_input_error(main)
