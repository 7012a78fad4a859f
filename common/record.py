"""The record of a run: loss and time of every iteration, metrics of every epoch, in one JSON file per rank.

record = Record(config, worker)
for batch in record.iterations(loader):      # times the wait for data, and the whole iteration
    with record.phase("forward"):
        ...
    record.loss(loss.item())
record.evaluation(epoch, metrics)
record.write()                               # output_dir/rank{r}.json and loss_{r}.txt

What becomes of an earlier run in the same folder: common/workers/run_files.py.
"""

import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm

from common.config import RunConfig
from common.errors import InputError
from common.gradient_check import GradientCheck
from common.optim import number_of_epochs, total_steps
from common.paths import ROOT, atomic_write, shown
from common.step_profiler import StepProfiler, parameter_table
from common.workers.process_group import Worker
from common.workers.processor import ProcessorMeter, disturbance, other_programs
from common.workers.rows import STOPPED_FILE
from common.workers.run_files import set_aside

TINY_BERT = (
    "tiny is not pretrained: random weights, one attention head built by hand; the position of a word alone is enough "
    "for an accuracy of about 0.94"
)
TODO = re.compile(rb"^ *# TODO\(\w+\) ", re.MULTILINE)
PHASES = ("data", "forward", "backward", "communication", "optimizer")


class Record:
    """The measurements of one run on one rank. Rank 0 also prints them."""

    def __init__(self, config: RunConfig, worker: Worker):
        self.config = config
        self.worker = worker
        self.devices = [worker.device]  # that compute in a step; a pipeline with threads has several
        self.steps_per_epoch = 0
        self.examples = {"train": 0, "dev": 0}
        self.parameters = 0
        self.losses: list[float] = []
        self.evaluations: list[dict] = []
        self.collectives = worker.collectives
        self._iterations: list[dict] = []
        self._phases: dict[str, float] = {}
        self._processor = ProcessorMeter()
        self._begun = datetime.now(UTC).isoformat(timespec="seconds")
        _prepare(config)
        self._profiler = StepProfiler(config.output_dir, worker.rank) if config.profile else None
        self._check: GradientCheck | None = None
        self.gradient: str | None = None  # what --check_gradients says of the first step
        self._bars_off = None if worker.is_first else True  # None: where stderr is no terminal
        self._timeline = None
        if config.timeline:
            from common.timeline.run_timeline import RunTimeline  # here: a dozen modules that most runs do not need

            self._timeline = RunTimeline(config, worker)

    def describe(self, model: nn.Module, train: int, dev: int) -> None:
        """Record the size of the model and of the data."""
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.examples = {"train": train, "dev": dev}
        if self._timeline:
            self._timeline.capture.watch(model)
        if self.config.check_gradients:
            self._check = GradientCheck(model, self.worker)
        if self.worker.is_first:
            print(f"{self.parameters:,} parameters; {train:,} training and {dev:,} dev examples", flush=True)
            if Path(self.config.model_name_or_path).name.startswith("tiny-bert") and self.config.data_dir is None:
                print(TINY_BERT, flush=True)
            if self.config.profile:
                print(parameter_table(model))

    def epochs(self, loader) -> Iterator[int]:
        """Yield 0, 1, ... up to the last epoch of the run, with a progress bar on rank 0 if it has a terminal."""
        self.steps_per_epoch = len(loader)
        if self._timeline:
            self._timeline.read_clocks()
        self.collectives.drain()  # what was sent before training, such as DDP's first broadcast, does not count
        self.collectives.forget()
        self._processor = ProcessorMeter()  # only training counts
        count, steps = number_of_epochs(self.config, len(loader)), total_steps(self.config, len(loader))
        if self.worker.is_first:
            print(f"{steps} iterations, {len(loader)} in an epoch", flush=True)
        yield from tqdm(range(count), desc="epochs", disable=self._bars_off)

    def iterations(self, loader: Iterable) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches of one epoch on this worker's device; each is timed until the next one is requested."""
        left = total_steps(self.config, self.steps_per_epoch) - len(self._iterations)
        batches = self.worker.batches(itertools.islice(loader, left))
        total = min(left, self.steps_per_epoch)
        if self._timeline:
            self._timeline.capture.begin_epoch(len(self._iterations), total)
        with tqdm(total=total, desc="iterations", leave=False, disable=self._bars_off) as bar:
            begin = self._begin_iteration()
            for batch in batches:
                self._phases = {}
                self._end_phase("data", begin)
                self.worker.pulse.begin_iteration()
                yield batch
                self._synchronize()
                end = time.perf_counter()
                if self._timeline:
                    self._timeline.capture.end_step(len(self._iterations), begin, end)
                self._finish_iteration(end - begin)
                bar.update()
                begin = self._begin_iteration()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block. The same name may appear several times in one iteration."""
        assert name in PHASES, name
        if name == "optimizer" and self._check:
            self.gradient = self._check.verdict()
            self._check = None
            if self.worker.is_first:
                tqdm.write(self.gradient)
        begin = time.perf_counter()
        self.worker.pulse.phase = name
        yield
        self.worker.pulse.phase = ""
        self._synchronize()  # a GPU still computes after the call has returned
        self._end_phase(name, begin)

    def loss(self, value: float) -> None:
        """Record the loss of this iteration's batch, before the update; rank 0 prints it."""
        self.losses.append(value)
        if self.worker.is_first:
            tqdm.write(f"iteration {len(self.losses)}: loss {value:.6f}")

    def evaluation(self, epoch: int, metrics: dict[str, float]) -> None:
        """Record the dev metrics after an epoch (counted from 0). Rank 0 prints and keeps them."""
        if self.worker.is_first:
            self.evaluations.append({"epoch": epoch + 1, "metrics": metrics})
            tqdm.write(f"epoch {epoch + 1}: {_words(metrics)}")

    @property
    def seconds_per_iteration(self) -> float | None:
        """Return the mean time of an iteration without the first (a warm-up); None with fewer than two."""
        seconds = [iteration["seconds"] for iteration in self._iterations[1:]]
        return sum(seconds) / len(seconds) if seconds else None

    def write(self) -> None:
        """Write loss_{r}.txt and rank{r}.json; rank 0 prints the summary."""
        rank, folder = self.worker.rank, self.config.output_dir
        if self._profiler:
            self._profiler.close()
        self.collectives.drain()
        timeline = self._timeline.finish() if self._timeline else None
        with atomic_write(folder / f"loss_{rank}.txt") as file:
            file.writelines(f"{loss}\n" for loss in self.losses)
        with atomic_write(folder / f"rank{rank}.json") as file:
            json.dump(with_fingerprint({**self.as_dict(), "timeline": timeline}), file, indent=1)
        if self.worker.is_first:
            self._print_summary()
        if self._timeline:
            self._timeline.write(folder)

    def as_dict(self) -> dict:
        """Return the record as common/README.md describes it, in seconds and bytes."""
        return {
            "task": self.config.task,
            "rank": self.worker.rank,
            "world_size": self.worker.world_size,
            "config": {
                name: str(value) if isinstance(value, Path) else value for name, value in asdict(self.config).items()
            },
            "versions": versions(),
            "host": {
                "name": socket.gethostname(),
                "device": str(self.worker.device),
                "threads": torch.get_num_threads(),
                "cores": os.cpu_count(),
            },
            "begun": self._begun,
            "code": code_digests(),
            "parameters": self.parameters,
            "examples": self.examples,
            "steps_per_epoch": self.steps_per_epoch,
            "iterations": self._iterations,
            "evaluations": self.evaluations,
            "gradient": self.gradient,
            "collectives": self.collectives.summary(),
            "seconds_per_iteration": self.seconds_per_iteration,
            "processor": self._processor.so_far(),
        }

    def _begin_iteration(self) -> float:
        """Return the time at which the iteration begins; with --timeline, the profiler starts and stops before it."""
        if self._timeline:
            self._timeline.capture.begin_step(len(self._iterations))
        self._synchronize()
        return time.perf_counter()

    def _end_phase(self, name: str, begin: float) -> None:
        end = time.perf_counter()
        self._phases[name] = self._phases.get(name, 0.0) + end - begin
        if self._timeline:
            self._timeline.capture.phase(name, begin, end)

    def _finish_iteration(self, seconds: float) -> None:
        loss = self.losses[len(self._iterations)] if len(self.losses) > len(self._iterations) else None
        phases = {name: self._phases.get(name) for name in PHASES}
        self._iterations.append({"loss": loss, "seconds": seconds, "phases": phases})
        self.collectives.drain_before_it_overflows()
        if self._profiler:
            self._profiler.step()

    def _synchronize(self) -> None:
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _print_summary(self) -> None:
        if self.gradient:
            print(self.gradient)
        if self.losses:
            print("first losses:", " ".join(f"{loss:.6f}" for loss in self.losses[:5]))
        for evaluation in self.evaluations:
            print(f"after epoch {evaluation['epoch']}: {_words(evaluation['metrics'])}")
        if self.seconds_per_iteration is not None:
            print(f"mean time per iteration, without the first: {self.seconds_per_iteration:.4f} s")
        if self.worker.world_size == 1 and (warning := disturbance(other_programs([self._processor.so_far()]))):
            advice = "; OMP_NUM_THREADS=1 makes a run less sensitive" if torch.get_num_threads() > 1 else ""
            print(f"{warning}: its times are too long{advice}")
        print(f"record: {shown(self.config.output_dir)}/rank{self.worker.rank}.json", flush=True)


def versions() -> dict[str, str]:
    """Return the versions with which the figures were measured."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def code_digests() -> dict[str, str]:
    """Return name -> digest of the loaded files that hold a student's lines: which code made this run."""
    files = {Path(path) for module in [*sys.modules.values()] if (path := getattr(module, "__file__", None))}
    texts = {file: file.read_bytes() for file in files if file.is_relative_to(ROOT) and file.suffix == ".py"}
    return {shown(file).as_posix(): code_digest(text) for file, text in sorted(texts.items()) if TODO.search(text)}


def code_digest(text: bytes) -> str:
    return hashlib.sha256(text.replace(b"\r\n", b"\n")).hexdigest()[:16]


def with_fingerprint(record: dict[str, Any]) -> dict[str, Any]:
    """Add the digest of all other keys. After an edit by hand, it no longer fits."""
    content = {key: record[key] for key in record if key != "fingerprint"}
    return content | {"fingerprint": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]}


def _prepare(config: RunConfig) -> None:
    """On rank 0, create the folder and move an earlier run out of the way: the files of two runs must not be mixed."""
    if config.rank != 0:
        return
    folder = config.output_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        set_aside(folder)
        (folder / STOPPED_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"--output_dir: cannot write to {folder}: {error.strerror}") from None


def _words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
