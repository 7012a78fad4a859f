"""The comparison table: all strategies resident in the same workers, taking turns, and the table's own error.

    python -m benchmark.compare --workers 2 --model gpt2-tiny --max_steps 20 [--strategies ddp,fsdp] [--base ddp]
    python -m benchmark.compare --engine mine.py:Before,After           # engines of your own, beside ddp
    python -m benchmark.compare --launches 3                            # intervals over launches

In each round every strategy takes one step, in a random order that is the same on all workers, with a barrier before
and after each step, whose own time is taken out. `single` is the first worker alone, which computes all examples of the
step on its share of the cores, while the others wait: the ratio to it is the inverse of the speed-up over one worker.
Before that, each strategy has to show that its gradient is right (benchmark.prove, on a tiny model): a wrong one is
named and not timed, and the exit code is 1. All start from the same weights and see the same examples, so the timed
steps' losses and gradient norms are compared with single's, too.
"again" is a second engine of the strategy that all are compared with: its ratio, which should be 1, is the error of the
table. With --launches, all workers start so many times, and make the engines in an order that is drawn: figures are the
means of the launches, and from three on, intervals of time, exposed communication and memory are those of these means.

peak: what a step needs of memory. sent: by one worker in a step, and as which dtypes (gradients + parameters). exposed:
communication or waiting for another worker while nothing is computed, in two steps under the profiler after the last
round. norm: of the last step's gradient. metric: that of a user's own model, or BLEU with --bleu, after the last step.

Writes comparison.json, .csv, .png and .pdf to --output_dir, with --latex also .tex. Other flags are those of
benchmark.run.
"""

import argparse
import json
import os
import random
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch
import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.measure import comparison
from benchmark.measure.bars import Bar, draw_bars
from benchmark.measure.compared import AGAIN, WARM_UP, ComparedStrategy, trace
from benchmark.measure.comparison import COUNTED, Rounds, Row, evaluate, over_launches, read_rounds
from benchmark.measure.machine import busy, environment, machine_line, machine_words
from benchmark.measure.output import Json, latex, publish, text_table, write_csv
from benchmark.measure.turns import take_rounds_alone
from benchmark.names import names_of
from benchmark.prove import prove_all, small_settings, that_run, verdict
from benchmark.settings import Settings
from benchmark.strategies import FAMILIES, STRATEGIES, Label, why_not
from benchmark.training.workload import load_workload
from benchmark.workers import STARTER_REPORTS, join, of_everybody, on_workers
from common.errors import InputError, exit_on_input_error
from common.flags import positive
from common.paths import atomic_write
from common.workers.process_group import Worker, process_group


def work(settings: Settings, labels: list[Label], launch: int) -> None:
    """One worker: all strategies in turn; the first worker keeps the figures."""
    with process_group(settings, join) as worker:
        workload, drawn = load_workload(settings), random.Random(f"{settings.seed} {launch}")
        first = rounds_file(settings, 0)  # proved once
        proofs = read_rounds(first).proofs if launch else prove_labels(settings, worker, labels)
        wrong = [proof["strategy"] for proof in proofs if proof["sentence"]]
        engines = {}
        for label in drawn.sample(labels, len(labels)):
            if label.strategy not in wrong:
                engines[label] = ComparedStrategy(label, settings, worker, workload)
                worker.pulse.beat()
        compared = [engines[label] for label in labels if label in engines]
        turns, count = [strategy.turn for strategy in compared], settings.max_steps
        seconds = take_rounds_alone(turns, count, WARM_UP, drawn.randrange(2**32), dist.barrier)
        trace(worker, compared, count)
        for strategy in compared:
            worker.pulse.beat()
            strategy.note_metric(workload)
            dist.barrier()  # the first worker alone computes BLEU: without it, the others would wait for all of them
        figures = of_everybody([strategy.figures for strategy in compared], worker)
        losses = mean_losses(worker, compared, count)
        if worker.is_first:
            norms = [[None if n is None else float(n) for n in strategy.norms[:count]] for strategy in compared]
            rounds = Rounds([one.label for one in compared], seconds.tolist(), losses, norms, figures, proofs)
            with atomic_write(rounds_file(settings, launch)) as file:
                json.dump(asdict(rounds), file)


def rounds_file(settings: Settings, launch: int) -> Path:
    return settings.output_dir / (f"rounds_{launch}.json" if launch else "rounds.json")


def mean_losses(worker: Worker, compared: list[ComparedStrategy], count: int) -> list[list[float]]:
    """The losses of each strategy's first steps, as means over the workers that took them. A collective."""
    own = [[loss.item() for loss in one.losses[:count]] or [0.0] * count for one in compared]
    losses = torch.tensor(own, dtype=torch.float64, device=worker.device)
    dist.all_reduce(losses)  # workers see different shares of a step; single sees all of it, on the first worker
    workers = torch.tensor([[one.settings.world_size] for one in compared], device=worker.device)
    return (losses / workers).tolist()  # type: ignore[no-any-return]


def prove_labels(settings: Settings, worker: Worker, labels: list[Label]) -> list[Json]:
    """The rows of benchmark.prove for these strategies, on every worker. A collective."""
    small = small_settings(settings)
    names = dict.fromkeys(label.strategy for label in labels if label.strategy != "single")
    runnable, left_out = that_run(small, list(names))
    rows = [[proof.row() for proof in [*left_out, *prove_all(small, worker, runnable)]]]
    dist.broadcast_object_list(rows)
    return rows[0]


def labels_of(settings: Settings, names: list[str], base: str) -> tuple[list[Label], list[str]]:
    """The strategies to compare, `single` first, and why others are left out."""
    others = [name for name in dict.fromkeys([base, *names]) if name != "single"]
    reasons = {name: why_not(replace(settings, strategy=name)) for name in others}
    labels = [Label(name) for name in ("single", *others) if not reasons.get(name)]
    return [*labels, Label(base, AGAIN)], [reason for reason in reasons.values() if reason]


def report(settings: Settings, left_out: list[str], base: str, begin: Json, flags: argparse.Namespace) -> None:
    """Print the table and, as the last line, the figures; keep them in files. Exits with 1 for a fault."""
    folder = settings.output_dir
    launches = [read_rounds(rounds_file(settings, launch)) for launch in range(flags.launches)]
    rounds, about_rounds = launches[0], comparison.caption(settings, flags.launches)
    notes = [f"not proved: {proof['left_out']}" for proof in rounds.proofs if proof["left_out"]]
    ending = "nothing is wrong, but not all is proved" if notes else "all ok"
    notes += [f"left out: {reason}" for reason in left_out]
    if Label(base) not in rounds.labels:
        notes.append(f"note: {base} is wrong, so the others are compared with single")
        base = "single"
    rows, faults = over_launches([evaluate(settings, base, rounds, begin["gpu"]) for rounds in launches])
    wrong, machine = verdict(one.sentence for one in faults), machine_line(begin)
    notes += comparison.notes_of(settings, rows, base, flags.launches)
    notes += [f"note: {words}"] if (words := busy(begin)) else []
    lines, doubts = comparison.table(settings, rows, faults, base), [note for note in notes if "do not compare" in note]
    print(about_rounds, text_table(lines), COUNTED, machine, *notes, wrong or ending, sep="\n")
    about = "\n".join([about_rounds, machine_words(begin), *doubts])
    draw(folder / "comparison.png", rows, base, about)
    flat = [flattened(row) | {"flagged": "; ".join(doubts)} for row in rows]
    write_csv(folder / "comparison.csv", [list(flat[0]), *(list(row.values()) for row in flat)])
    if flags.latex:
        with atomic_write(folder / "comparison.tex") as file:
            file.write(latex(lines, about))
    result = {
        "wrong": [str(one.label) for one in faults],
        "rows": [*(row.as_json() for row in rows), *(one.as_json() for one in faults)],
        "steps_ms": {str(label): [ms for one in launches for ms in one.steps_ms(label)] for label in rounds.labels},
        "launches": flags.launches,
        "left_out": left_out,
        "base": base,
        "notes": notes,
    }
    publish(result | {"environment": begin, "settings": settings.as_json()}, folder / "comparison.json")
    if wrong:
        sys.exit(wrong)


def draw(path: Path, rows: list[Row], base: str, title: str) -> None:
    bars = [Bar(str(row.label), STRATEGIES[row.label.strategy].family, row.ratio, *row.ratio_95) for row in rows]
    draw_bars(path, bars, f"time of a step, over that of {base}", title, FAMILIES, also=".pdf")


def flattened(row: Row) -> Json:
    """A row for CSV: an interval is two columns."""
    values = row.as_json()
    for name in [name for name in values if name.endswith("_95")]:
        values[f"{name}_low"], values[f"{name}_high"] = values.pop(name)
    return values


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="ddp", help="the one to compare with (ddp)")
    parser.add_argument("--latex", action="store_true", help="write the table to comparison.tex, too")
    parser.add_argument(
        "--launches", type=positive, default=1, help="starts of all workers; 3 or more for intervals (1)"
    )
    parser.add_argument("--launch", type=int, default=0, help=argparse.SUPPRESS)  # of a worker: which one it is


def main() -> None:
    begin = environment()
    settings, flags = parse(sys.argv[1:], "compare", __doc__, add_flags)
    if settings.max_steps <= WARM_UP:
        raise InputError(f"--max_steps: expected more than the {WARM_UP} rounds of warm-up, got {settings.max_steps}")
    (base,) = names_of("--base", flags.base, STRATEGIES)[:1]
    labels, left_out = labels_of(settings, flags.names, base)
    names = [label.strategy for label in labels]
    if flags.launches > 1 and not (flags.starts_workers or STARTER_REPORTS in os.environ):
        raise InputError("--launches: works where --workers starts the workers; here, run the command several times")
    reports = False
    do = partial(work, settings, labels, flags.launch)
    for launch in range(flags.launches if flags.starts_workers else 1):  # the later ones find the first one's files
        more = ["--launch", str(launch), "--overwrite_output_dir"] if flags.launches > 1 else []
        reports = on_workers("benchmark.compare", settings, flags.starts_workers, names, do, *more)
    if reports:
        report(settings, left_out, base, begin, flags)


if __name__ == "__main__":
    exit_on_input_error(main)
