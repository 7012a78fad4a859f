"""The comparison table: all strategies resident in the same workers, taking turns, and the table's own error.

    python -m benchmark.compare --workers 2 --model gpt2-tiny --max_steps 20 [--strategies ddp,fsdp] [--base ddp]
    python -m benchmark.compare --engine mine.py:Before,After           # engines of your own, beside ddp

In each round every strategy takes one step, in a random order that is the same on all workers, with a barrier before
and after each step, whose own time is taken out. `single` is the first worker alone, which computes all examples of the
step on its share of the cores, while the others wait: the ratio to it is the inverse of the speed-up over one worker.
Before that, each strategy has to show that its gradient is right (benchmark.prove, on a tiny model): a wrong one is
named and not timed, and the exit code is 1. All start from the same weights and see the same examples, so the timed
steps' losses and gradient norms are compared with single's, too.
"again" is a second engine of the strategy that all are compared with: its ratio, which should be 1, is the error of the
table.

peak: what a step needs of memory. sent: by one worker in a step, and as which dtypes (gradients + parameters). exposed:
communication or waiting for another worker while nothing is computed, in two steps under the profiler after the last
round. norm: of the last step's gradient. metric: that of a user's own model, or BLEU with --bleu, after the last step.

Writes comparison.json, .csv, .png and .pdf to --output_dir, with --latex also .tex. Other flags are those of
benchmark.run.
"""

import argparse
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch
import torch.distributed as dist

from benchmark.arguments import parse
from benchmark.measure.bars import Bar, draw_bars
from benchmark.measure.compared import AGAIN, WARM_UP, ComparedStrategy, trace
from benchmark.measure.comparison import Rounds, Row, caption, evaluate, notes_of, read_rounds, table
from benchmark.measure.machine import environment, machine_line, machine_words
from benchmark.measure.output import Json, latex, publish, text_table, write_csv
from benchmark.measure.turns import take_rounds_alone
from benchmark.names import names_of
from benchmark.prove import prove_all, small_settings, that_run, verdict
from benchmark.settings import Settings
from benchmark.strategies import FAMILIES, STRATEGIES, Label, why_not
from benchmark.training.workload import load_workload
from benchmark.workers import join, of_everybody, on_workers
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from common.workers.process_group import Worker, process_group


def work(settings: Settings, labels: list[Label]) -> None:
    """One worker: all strategies in turn; the first worker keeps the figures."""
    with process_group(settings, join) as worker:
        workload = load_workload(settings)
        proofs = prove_labels(settings, worker, labels)
        wrong = [proof["strategy"] for proof in proofs if proof["sentence"]]
        compared = []
        for label in labels:
            if label.strategy not in wrong:
                compared.append(ComparedStrategy(label, settings, worker, workload))
                worker.pulse.beat()
        turns, count = [strategy.turn for strategy in compared], settings.max_steps
        seconds = take_rounds_alone(turns, count, WARM_UP, settings.seed, dist.barrier)
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
            with atomic_write(settings.output_dir / "rounds.json") as file:
                json.dump(asdict(rounds), file)


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


def report(settings: Settings, left_out: list[str], base: str, begin: Json, with_latex: bool) -> None:
    """Print the table and, as the last line, the figures; keep them in files. Exits with 1 for a fault."""
    folder = settings.output_dir
    rounds = read_rounds(folder / "rounds.json")
    notes = [f"not proved: {proof['left_out']}" for proof in rounds.proofs if proof["left_out"]]
    ending = "nothing is wrong, but not all is proved" if notes else "all ok"
    notes += [f"left out: {reason}" for reason in left_out]
    if Label(base) not in rounds.labels:
        notes.append(f"note: {base} is wrong, so the others are compared with single")
        base = "single"
    rows, faults = evaluate(settings, base, rounds, begin["gpu"])
    wrong, machine = verdict(one.sentence for one in faults), machine_line(begin)
    notes += notes_of(settings, rows, base)
    lines, doubts = table(settings, rows, faults, base), [note for note in notes if "do not compare" in note]
    print(caption(settings), text_table(lines), machine, *notes, wrong or ending, sep="\n")
    about = "\n".join([caption(settings), machine_words(begin), *doubts])
    draw(folder / "comparison.png", rows, base, about)
    flat = [flattened(row) | {"flagged": "; ".join(doubts)} for row in rows]
    write_csv(folder / "comparison.csv", [list(flat[0]), *(list(row.values()) for row in flat)])
    if with_latex:
        with atomic_write(folder / "comparison.tex") as file:
            file.write(latex(lines, about))
    result = {
        "wrong": [str(one.label) for one in faults],
        "rows": [*(row.as_json() for row in rows), *(one.as_json() for one in faults)],
        "steps_ms": rounds.steps_ms(),
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
    for name in ("step_ms_95", "ratio_95"):
        values[f"{name}_low"], values[f"{name}_high"] = values.pop(name)
    return values


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="ddp", help="the one to compare with (ddp)")
    parser.add_argument("--latex", action="store_true", help="write the table to comparison.tex, too")


def main() -> None:
    begin = environment()
    settings, flags = parse(sys.argv[1:], "compare", __doc__, add_flags)
    if settings.max_steps <= WARM_UP:
        raise InputError(f"--max_steps: expected more than the {WARM_UP} rounds of warm-up, got {settings.max_steps}")
    (base,) = names_of("--base", flags.base, STRATEGIES)[:1]
    labels, left_out = labels_of(settings, flags.names, base)
    names = [label.strategy for label in labels]
    if on_workers("benchmark.compare", settings, flags.starts_workers, names, partial(work, settings, labels)):
        report(settings, left_out, base, begin, flags.latex)


if __name__ == "__main__":
    exit_on_input_error(main)
