"""The rows of benchmark.checks.timings: what takes turns, and within which limits."""

import contextlib
import copy
import io
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from benchmark.checks.pipeline_speed import ROWS, STAGES, batch, loss_of, make_pipe, make_stage
from benchmark.measure.turns import Clock, Step
from common.arguments import parse_glue_arguments
from common.config import RunConfig
from common.data.glue import load_glue
from common.data.sample_data import glue_sample_dir
from common.models.load import load_tokenizer
from common.optim import set_seed
from common.paths import ROOT, import_file
from common.record import Record
from common.workers.process_group import Worker
from common.workers.pulse import Pulse
from common.workers.pulse import Thread as ThreadClock
from common.workers.watchdog import Watchdog

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


def watchdog(config: RunConfig, worker: Worker, quick: bool) -> Timed:
    """Steps with one all_reduce per parameter; with the watchdog's thread and store, and the notes of a step."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=1273, hidden_size=64, num_hidden_layers=2,
                                                     num_attention_heads=4, intermediate_size=256))  # fmt: skip
    batch = {"input_ids": torch.ones(16, 64).long(), "labels": torch.zeros(16).long()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sync, threads = lesson("task2b_allreduce").sync_gradients, list[float]()

    def block(watched: bool) -> None:
        pulse = Pulse()
        guard = Watchdog(config, pulse, worker.collectives) if watched else None
        thread = ThreadClock(guard.thread_ident) if guard else None
        begin = store_seconds() + ((thread.cpu_seconds or 0.0) if thread else 0.0)
        for _ in range(3 if quick else 20):
            worker.pulse.beat()
            if watched:
                pulse.beat()
                for _ in range(4):
                    pulse.phase = "forward"
                    pulse.phase = ""
            model(**batch).loss.backward()
            sync(model, worker.world_size)
            optimizer.step()
            optimizer.zero_grad()
        if guard and thread:
            threads.append(store_seconds() + (thread.cpu_seconds or 0.0) - begin)
            guard.close()

    def shares(seconds: np.ndarray) -> dict[str, float]:
        return {"thread and store, of a step": sum(threads[-len(seconds) :]) / float(seconds[:, 1].sum())}

    steps = {"without": lambda: block(False), "watched": lambda: block(True)}
    return Timed(steps, {"thread and store, of a step": (0.0, 0.005)}, time.process_time, shares=shares)


def store_seconds() -> float:
    """CPU seconds of the threads that serve the ranks' stores in this process (Linux)."""
    threads = [task for task in Path("/proc/self/task").glob("*") if "tcpstore" in (task / "comm").read_text()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in threads) / 1e9


def pipe(folder: Path, quick: bool) -> Timed:
    """A step of the pipe, of its two stages one after the other, of the stages apart, and of torch's schedules.

    Two cores that share a memory, a cache or, on a rented machine, one physical core are not twice as fast as one. So
    what these cores can do takes M-1 micro-batches at the speed of two stages that run at the same time and never wait
    for each other, and one micro-batch, the bubble, at the speed of one stage after the other. What the pipe lacks to
    it is the pipe's own cost: wake-ups, queues, cutting the graph, and a clock cycle as long as its slower stage.
    """
    torch.set_num_threads(1)
    model, stages = make_pipe()
    parameters, norms = list(model.parameters()), dict[str, float]()
    ask, steps, counts = torch_processes(folder), dict[str, Step](), [4] if quick else [4, 8, 16]

    def ours(step: Step, name: str) -> Step:
        def forgetting() -> None:  # no gradient has to add to another's
            step()
            norms[name] = float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())
            for parameter in parameters:
                parameter.grad = None

        return forgetting

    def one_after_another(x: torch.Tensor) -> None:
        for rows in x.split(ROWS):
            loss_of(stages[1](stages[0](rows))).backward()

    def theirs(name: str, schedule: str, m: int) -> None:
        norms[name] = ask(schedule, m)

    for m in counts:
        x = batch(m)
        for name, step in (
            ("pipe", partial(lambda x: loss_of(model(x)).backward(), x)),
            ("one after another", partial(one_after_another, x)),
            ("each alone", partial(each_in_a_thread, stages, x)),
        ):
            steps[f"{name}, M={m}"] = ours(step, f"{name}, M={m}")
        for schedule in ("gpipe", "1f1b"):
            steps[f"torch's {schedule}, M={m}"] = partial(theirs, f"torch's {schedule}, M={m}", schedule, m)

    def shares(seconds: np.ndarray) -> dict[str, float]:
        of = dict(zip(steps, seconds.T, strict=True))
        ratios = {}
        for m in counts:
            piped, plain, apart = (of[f"{name}, M={m}"] for name in ("pipe", "one after another", "each alone"))
            ratios[f"of what these cores can do, M={m}"] = float(np.median((apart * (m - 1) + plain) / m / piped))
            for schedule in ("gpipe", "1f1b"):
                ratios[f"step over torch's {schedule}, M={m}"] = float(
                    np.median(piped / of[f"torch's {schedule}, M={m}"])
                )
        return ratios

    def equal() -> bool:
        same = {name: norm for name, norm in norms.items() if not name.startswith("each alone")}
        return all(abs(norm / norms[f"pipe, M={name.rpartition('=')[2]}"] - 1) < 1e-4 for name, norm in same.items())

    limits = {f"step over torch's {name}, M={m}": (0.0, most) for m in counts for name, most in AT_MOST.items()}
    limits |= {f"of what these cores can do, M={m}": (0.95, float("inf")) for m in counts}
    return Timed(steps, limits, equal=equal, shares=shares)


AT_MOST = {"gpipe": 0.95, "1f1b": 1.00}


def each_in_a_thread(stages: list[nn.Sequential], x: torch.Tensor) -> None:
    """Forward and backward of all micro-batches by each stage alone: nobody waits for anybody."""

    def work(stage: nn.Sequential) -> None:
        torch.set_num_threads(1)
        outputs = [stage(rows) for rows in x.split(ROWS)]
        for output in reversed(outputs):
            loss_of(output).backward()

    threads = [Thread(target=work, args=(stage,)) for stage in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def torch_processes(folder: Path) -> Callable[[str, int], float]:
    """Start two processes with a stage each; the function takes a step there, and returns the gradients' norm."""
    context, connections = get_context("spawn"), []
    for rank in range(STAGES):
        mine, other = context.Pipe()
        context.Process(target=torch_process, args=(rank, f"{folder}/store", other), daemon=True).start()
        connections.append(mine)

    def ask(schedule: str, m: int) -> float:
        for connection in connections:
            connection.send((schedule, m))
        return sum(connection.recv() for connection in connections) ** 0.5

    return ask


def torch_process(rank: int, store: str, connection: Connection) -> None:
    """One stage: run the step that is asked for, answer the squared norm of the gradients."""
    from pipeline.distributed import make_schedule

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, STAGES), rank=rank, world_size=STAGES)
    stage, schedules = make_stage(rank), {}
    with contextlib.suppress(EOFError):
        while True:
            name, m = connection.recv()
            x = batch(m)
            if (name, m) not in schedules:
                schedules[name, m] = make_schedule(name, [stage], m, loss_of, torch.device("cpu"))
            schedules[name, m].step(*([x] if rank == 0 else []), target=x, return_outputs=False)
            connection.send(sum(float(p.grad.norm()) ** 2 for p in stage.parameters() if p.grad is not None))
            stage.zero_grad()
    dist.destroy_process_group()


ROWS_HERE: dict[str, Callable[[Path, bool], Timed]] = {"loop": loop, "record": record, "pipe": pipe}
IN_RANKS: dict[str, Callable[[RunConfig, Worker, bool], Timed]] = {"ladder": ladder, "watchdog": watchdog}
