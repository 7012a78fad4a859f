"""The rows of benchmark.checks.timings: what takes turns, and within which limits."""

import contextlib
import copy
import io
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from benchmark.measure.turns import Clock, Step
from common.arguments import parse_glue_arguments
from common.data.glue import load_glue
from common.data.sample_data import glue_sample_dir
from common.models.load import load_tokenizer
from common.optim import set_seed
from common.paths import ROOT, import_file
from common.record import Record
from common.workers.process_group import Worker

WORLD_SIZE = 4  # of the graders
ENOUGH = 3_000_000  # bytes of text: a start costs some milliseconds whatever follows
LABELS = {"entailment": 0, "not_entailment": 1}


def nothing_else(seconds: np.ndarray) -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Timed:
    """Things that take turns. limits: name -> least and most ratio to the first, or of a share."""

    steps: Mapping[str, Step]
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    clock: Clock = time.perf_counter
    equal: Callable[[], bool] = lambda: True  # whether all have given the same
    shares: Callable[[np.ndarray], dict[str, float]] = nothing_else  # (rounds, steps) seconds -> name -> share


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def lesson(task: str) -> Any:
    """The solved script of a task, as a module."""
    return import_file(ROOT / task / "run_glue.py", task)


def loop(folder: Path, quick: bool) -> Timed:
    """Both train the tiny BERT on the sample from the same weights. The bare loop shares no code with the task."""
    words = ["--do_train", "--max_steps", "3" if quick else "20", "--output_dir", str(folder)]
    config, task = parse_glue_arguments("task1_single", words), lesson("task1_single")
    tokenizer = load_tokenizer(config.tokenizer_name, "bert")
    data, rows = load_glue(config, tokenizer), read_pairs(tokenizer, config.max_seq_length)
    set_seed(config.seed)
    model, losses = task.load_model(config), dict[str, list[float]]()

    def house() -> None:
        torch.manual_seed(1)
        record = Record(config, Worker())
        with silent():
            task.train(config, Worker(), copy.deepcopy(model), data, record)
        losses["house"] = record.losses

    def bare() -> None:
        torch.manual_seed(1)
        found, mine = [], copy.deepcopy(model)
        order = torch.randperm(len(rows["labels"]), generator=torch.Generator().manual_seed(config.seed)).tolist()
        loader: DataLoader = DataLoader(range(len(order)), sampler=order, batch_size=config.per_gpu_train_batch_size)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(mine.parameters(), lr=config.learning_rate, weight_decay=0.0)
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, int(config.num_train_epochs * len(loader)))
        mine.train()
        for chosen, _ in zip(loader, range(config.max_steps), strict=False):
            loss = mine(**{name: values[chosen] for name, values in rows.items()}).loss
            loss.backward()
            clip_grad_norm_(mine.parameters(), config.max_grad_norm)
            optimizer.step()
            scheduler.step()
            mine.zero_grad()
            found.append(loss.item())
        losses["bare"] = found

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


def record(folder: Path, quick: bool) -> Timed:
    """Whole runs of task 2b on two ranks; and an empty loop's Record: an upper bound of what it adds to a step."""
    steps = 200 if quick else 2000
    empty = Record(
        parse_glue_arguments("task1_single", ["--max_steps", str(steps), "--output_dir", str(folder)]), Worker()
    )
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
        import json

        step = json.loads((folder / "run" / "rank0.json").read_text())["seconds_per_iteration"]
        return {"record without a timeline": off / step}

    limits = {"--timeline": (0.0, 1.03), "record without a timeline": (0.0, 0.01)}
    return Timed({"without": run, "--timeline": lambda: run("--timeline")}, limits, cpu_of_children, shares=shares)


def graders(folder: Path, quick: bool) -> Timed:
    """The same student's function on the same gradients, by four forked ranks and by four fresh interpreters."""
    from grader import ranks
    from grader.in_rank import PROBE
    from grader.wire import drawn
    from tests.gradients import test_averaging as averaging

    gradients = [drawn.gradients(1, rank, list(drawn.SHAPES)) for rank in range(WORLD_SIZE)]
    each = [{"gradients": [own], "weight": drawn.weight(rank)} for rank, own in enumerate(gradients)]  # one call
    setting = {"shapes": drawn.SHAPES, "frozen": [], "tied": False, "dtype": "float32", "calls": averaging.SYNC}
    arguments = averaging.average.arguments() | setting | {"file": "task2b_allreduce/run_glue.py", "each": each}
    means = dict[str, list[np.ndarray]]()

    def zygote() -> None:
        left = ranks.run(PROBE, WORLD_SIZE, arguments).values[0][0]
        means["zygote"] = [left[f"parameter {k}"] for k in range(len(drawn.SHAPES))]

    def spawn() -> None:
        (folder / "meeting").unlink(missing_ok=True)
        torch.multiprocessing.spawn(spawned, args=(str(folder), gradients), nprocs=WORLD_SIZE)
        with np.load(folder / "grads.npz") as saved:
            means["spawn"] = [saved[f"arr_{number}"] for number in range(len(gradients[0]))]

    def equal() -> bool:
        pairs = zip(means["zygote"], means["spawn"], strict=True)
        return all(np.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in pairs)

    return Timed({"zygote": zygote, "spawn": spawn}, {"spawn": (10.0, float("inf"))}, equal=equal)


def spawned(rank: int, folder: str, gradients: list[list[np.ndarray]]) -> None:
    """One rank of the other way: load torch and the student's file, join, average, let rank 0 save what it has."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD_SIZE)
    model = nn.ParameterList([nn.Parameter(torch.zeros(gradient.shape)) for gradient in gradients[rank]])
    for parameter, gradient in zip(model, gradients[rank], strict=True):
        parameter.grad = torch.from_numpy(gradient)
    lesson("task2b_allreduce").sync_gradients(model, WORLD_SIZE)
    if rank == 0:
        np.savez(f"{folder}/grads.npz", *[parameter.grad.numpy() for parameter in model])
    dist.destroy_process_group()


def commands(folder: Path, quick: bool) -> Timed:
    """What a student waits for: each in a fresh process."""
    regions = ["p.2"] if quick else ["1.2", "2a.3", "2b.1", "3.1", "4.1", "p.4", "b.1"]
    lines = {
        "import torch, transformers": ["-c", "import torch, transformers"],
        "task1_single/run_glue.py --help": ["task1_single/run_glue.py", "--help"],
        "cluster.launch --help": ["-m", "cluster.launch", "--help"],
        **{f"pytest --region {region}": ["-m", "pytest", "-q", "--region", region] for region in regions},
    }

    def run(words: list[str]) -> Step:
        return lambda: subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)

    steps = {name: run(words) for name, words in lines.items()}
    return Timed(steps, {"task1_single/run_glue.py --help": (0, 1.3)})


ROWS: dict[str, Callable[[Path, bool], Timed]] = {
    "loop": loop,
    "record": record,
    "graders": graders,
    "commands": commands,
}
