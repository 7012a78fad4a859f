"""Measure what predictions are made from: computing, sending and the engines' own cost, on this machine.

    python -m benchmark.calibrate                                              # loopback, gpt2-tiny: a minute
    python -m benchmark.calibrate --links 100mbit,1gbit --models gpt2-tiny,gpt2-24m --workers 1,2,4

Measured for each model: the parts of a step by batch size and by the number of workers that share this machine's cores.
For each link: every operation by size and number of workers; `loopback` is this machine, a rate means emulated nodes.
For the engines: a whole step of each strategy on loopback, on several workers; what a prediction of the same step lacks
is the engine's own cost, which is then added to all predictions.

All of it is measured on CPUs with Gloo, on a machine with GPUs as well.

The result is one JSON file. What is measured again replaces what was there; everything else stays, as long as machine
and versions are the same.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from benchmark.cost import calibration as stored
from benchmark.cost.calibration import LOOPBACK, Calibration
from benchmark.cost.collective_times import moved
from benchmark.cost.measuring.plan import CalibrationPlan
from benchmark.engines.operators import called_every, compile_operators
from benchmark.measure.output import rows_table
from benchmark.names import command_parser, models_of, names_of, numbers_of
from benchmark.strategies import STRATEGIES
from benchmark.workers import on_emulated_nodes, start_workers
from cluster.emulate import bits_per_second, why_not
from cluster.guard import threads_per_command
from common.errors import InputError, exit_on_input_error

SIZES = (4, 2**12, 2**16, 2**18, 2**19, 2**20, 2**22, 2**24)  # bytes
SLOW, SLOW_SIZE = 300e6, 2**20  # below this rate, pieces of more than this many bytes take too long
MODULE = "benchmark.cost.measuring.rank"
START = 12  # seconds until workers have loaded torch and met


def sizes_for(link: str) -> list[int]:
    """Return the sizes at which a link is measured."""
    most = SLOW_SIZE if link != LOOPBACK and bits_per_second(link) < SLOW else SIZES[-1]
    return [size for size in SIZES if size <= most]


def execute(plan: CalibrationPlan, workers: int, flags: list[str]) -> Calibration:
    """Run a plan on `workers` workers, here or on emulated nodes; return what they measured."""
    about = START + plan.seconds * (bool(plan.sizes) + bool(plan.models) + bool(plan.turns))
    with tempfile.TemporaryDirectory() as folder, clock(f"{plan.link}, {workers} workers", about):
        task, result = Path(folder) / "plan.json", Path(folder) / "result.json"
        task.write_text(json.dumps(asdict(plan)))
        words = [str(task), str(result), "--no_cuda", *flags]  # times of a GPU's calls would be those of launches
        if plan.link == LOOPBACK:
            code = start_workers(MODULE, workers, words, quiet=True)  # frameworks print
        else:
            code = on_emulated_nodes(MODULE, workers, words, plan.link)
        if code:
            raise InputError(f"calibration of {plan.link} failed with exit code {code}; its messages are above")
        return stored.read(result)


@contextmanager
def clock(what: str, about: float) -> Iterator[None]:
    """While the block runs, show how many of about `about` seconds have passed."""
    layout = "{desc}: {bar} {n} of about {total} s"
    with tqdm(desc=what, total=round(about), unit="s", bar_format=layout) as bar:
        with called_every(1.0, lambda: bar.update(int(bar.n < bar.total))):
            yield


def merge(calibration: Calibration, measured: Calibration) -> Calibration:
    """Return the calibration with what was measured; an entry replaces an older one of the same thing."""
    lists: dict[str, Any] = {}
    for name in stored.READ:
        fresh = getattr(measured, name)
        names = {identity(entry) for entry in fresh}
        lists[name] = [entry for entry in getattr(calibration, name) if identity(entry) not in names] + fresh
    return replace(calibration, **lists, date=measured.date, load=measured.load)


def identity(entry: Any) -> tuple:
    """What an entry is about: all its fields that say what was measured, and none that says what came out."""
    keys = ("link", "operation", "strategy", "model", "length", "batch", "workers")
    return tuple(getattr(entry, field.name) for field in fields(entry) if field.name in keys)


def table(calibration: Calibration) -> str:
    """For people: a step without communication, and what each link does.

    busbw: what a rank sends in a second, as nccl-tests define it.
    """
    rows: list[dict[str, Any]] = [
        {
            "model": Path(one.model).name, "length": one.length, "batch": one.batch, "workers": one.workers,
            "forward ms": 1e3 * sum(one.forward.values()),
            "backward ms": 1e3 * (sum(one.backward.values()) + one.tail),
            "optimizer ms": 1e3 * one.optimizer,
        }
        for one in calibration.profiles
    ]  # fmt: skip
    for sent in calibration.transfers:
        size, seconds = sent.bytes[-1], sent.seconds[-1]
        about = {"link": sent.link, "operation": sent.operation, "workers": sent.workers}
        times = {"least ms": 1e3 * sent.seconds[0], "largest MB": size / 1e6, "ms": 1e3 * seconds}
        rows.append(about | times | {"busbw Mbit/s": 8 * moved(sent.operation, size, sent.workers) / seconds / 1e6})
    for e in calibration.engines:
        about = {"engine": e.strategy, "model": Path(e.model).name, "batch": e.batch, "workers": e.workers}
        rows.append(about | {"ms per step": 1e3 * e.seconds})
    return rows_table(rows)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the flags; raises InputError before anything is measured."""
    parser = command_parser("calibrate", __doc__)
    add = parser.add_argument
    add("--links", default=LOOPBACK, help="loopback, or rates of emulated links such as 100mbit,1gbit (loopback)")
    add("--models", default="gpt2-tiny", help="gpt2-tiny")
    add("--workers", default="1,2", help="numbers of workers that compute and send at the same time (1,2)")
    add("--batches", default="1,2,4,8", help="examples of one worker (1,2,4,8)")
    add("--length", type=int, default=64, help="tokens of an example (64)")
    add("--strategies", default="all", help="whose engines are measured: names, all or none (all)")
    add("--engine_batch", type=int, default=4, help="examples of one worker in the engines' steps (4)")
    add("--seconds", type=float, default=6.0, help="measure so long for each link, and for compute and engines (6)")
    add("--output", type=Path, default=stored.DEFAULT, help="the file (%(default)s)")
    arguments = parser.parse_args(argv)
    arguments.links = [word for word in arguments.links.split(",") if word]
    for link in arguments.links:
        if link != LOOPBACK:
            bits_per_second(link)
            if reason := why_not():
                raise InputError(f"--links {link}: {reason}")
    for name in ("workers", "batches"):
        setattr(arguments, name, sorted(set(numbers_of(f"--{name}", getattr(arguments, name)))))
    arguments.models = models_of(arguments.models)
    words = arguments.strategies
    names = [] if words == "none" else names_of("--strategies", words, STRATEGIES)
    arguments.strategies = [name for name in names if not name.endswith("_offload")]  # they are not predicted
    if not arguments.seconds > 0:
        raise InputError(f"--seconds: expected more than 0, got {arguments.seconds:g}")
    return arguments


def calibrated(calibration: Calibration, arguments: argparse.Namespace) -> Iterator[Calibration]:
    """Measure what the command line asks for, piece by piece; yield the calibration after each."""
    flags = ["--length", str(arguments.length)]
    for link in arguments.links:
        plan = CalibrationPlan(link, arguments.workers, sizes_for(link), seconds=arguments.seconds)
        if link == LOOPBACK:
            plan = replace(plan, models=arguments.models, batches=arguments.batches)
        calibration = merge(calibration, execute(plan, max(arguments.workers), flags))
        yield calibration
    several = [count for count in arguments.workers if count > 1] or arguments.workers
    for count in several if LOOPBACK in arguments.links else []:
        for labels in together(arguments.strategies, count):
            engines = [(label, arguments.engine_batch) for label in labels]
            turns = [(model, engines) for model in arguments.models]
            seconds = arguments.seconds * len(labels) / max(1, len(arguments.strategies)) / len(turns)
            plan = CalibrationPlan(turns=turns, seconds=seconds)
            calibration = merge(calibration, execute(plan, count, flags))
            yield calibration


def together(strategies: list[str], workers: int) -> list[list[str]]:
    """Return which engines may be resident together.

    A worker that computes with several threads has a pool of them, which wait actively for the next piece of work. As
    soon as gloo copies a large tensor with a pool of its own, there are more threads than cores, and OpenMP lets all of
    them sleep instead, in this process for good: every later step takes up to twice as long. So there, every strategy
    gets a process of its own.
    """
    if not strategies:
        return []
    if threads_per_command(workers) > 1:
        return [[name] for name in strategies]
    return [strategies]


def main() -> None:
    arguments = parse(sys.argv[1:])
    compile_operators(arguments.strategies, no_cuda=True)
    before = calibration = stored.load(arguments.output) if arguments.output.exists() else stored.empty()
    for calibration in calibrated(before, arguments):
        stored.save(calibration, arguments.output)  # what is measured is kept, whatever happens next
    print(table(calibration))
    print(json.dumps({"file": str(arguments.output), **asdict(calibration)}))


if __name__ == "__main__":
    exit_on_input_error(main)
