"""The ladder in one table: tasks 1, 2a, 2b and 3 on the embedded data, one after the other.

    python -m cluster.demo.ladder [--workers 4] [--iterations 40] [-- flags of all tasks, such as --data_dir DIR]
    python -m cluster.demo.ladder --nodes 4 --rate 1gbit --random_bert 22M --batch 8 --iterations 10 -- --do_train
    python -m cluster.demo.ladder --demo        # on four emulated nodes where the system allows them

"MB passed to collectives" are the tensors that a rank passes in an iteration; the bytes that cross a network are the
subject of task 4. The times below the table are those of three steps with --timeline; runs/ladder_timeline.png shows
one of each task. The demo ends with GPT-2 on one and on two workers (cluster/demo/two_workers.py). Task 1 runs on one
worker, the others on --workers, all with the same seed and the same total batch. With --nodes, every worker runs on its
own emulated node, and all bytes between workers cross links of --rate. Each line comes from the records in runs/demo/;
the runs of your own commands are elsewhere.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import sys
from dataclasses import dataclass, replace

from cluster.demo.random_bert import SIZES, random_bert
from cluster.demo.two_workers import show_two_workers
from cluster.emulate import Plan, on_nodes, why_not
from cluster.launch import run_silently
from common.errors import InputError, exit_on_input_error
from common.figures import bars
from common.paths import ROOT
from common.timeline.boxes import Timeline, shortest_step
from common.timeline.parts import NAMES as PARTS
from common.timeline.parts import mean, milliseconds, parts
from common.timeline.picture import draw_below_each_other
from common.timeline.trace import read_trace
from common.workers.machine import no_cuda_for
from course.next_step import next_step, open_in_script
from course.table import load_course

FOLDER = ROOT / "runs" / "demo"  # apart from runs/<task>, which is for your own runs
TASKS = ("task1_single", "task2a_gather_scatter", "task2b_allreduce", "task3_ddp")
NAMES = ("1 one worker", "2a gather + scatter", "2b all_reduce", "3 DDP")

LOOPBACK = "Nothing crosses a network here: with a small model you see the latency, not the bandwidth."
# A model and links for which the number of bytes determines the time, as on real nodes: 34 MB of gradients take 0.27 s
# at 1 Gbit/s.
ON_NODES = ("--nodes", "4", "--rate", "1gbit", "--random_bert", "8M", "--batch", "8", "--iterations", "10")
TRAIN_ONLY = ("--do_train", "--learning_rate", "1e-5")


@dataclass(frozen=True)
class Rung:
    """One task's line of the table. Losses are means over the workers."""

    name: str
    losses: list[float]
    accuracy: float | None  # without an evaluation there is none
    seconds: float
    bytes_of_first: float  # passed to collectives in one iteration, by rank 0
    bytes_of_others: float  # by the last rank
    timeline: Timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4, help="number of workers on this machine (%(default)s)")
    parser.add_argument("--nodes", type=int, help="emulated nodes with one worker each, instead of --workers")
    parser.add_argument("--rate", default=Plan.rate, help="rate of each node's link (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="examples in a step of all workers (%(default)s)")
    parser.add_argument("--iterations", type=int, default=40, help="iterations per task (%(default)s)")
    parser.add_argument("--random_bert", choices=SIZES, help="a larger model, with random weights, instead of tiny")
    parser.add_argument("--demo", action="store_true", help=f"{' '.join(ON_NODES)}, if this machine can emulate nodes")
    parser.add_argument("flags", nargs="*", help="after --: flags of run_glue.py, passed to every task")
    arguments = parser.parse_args()
    is_demo = arguments.demo
    if is_demo:
        arguments = parser.parse_args(demo_flags(why_not()))
    n = arguments.nodes or arguments.workers
    if n < 2 or arguments.batch % n:
        raise InputError(f"expected 2 or more workers that divide --batch {arguments.batch}, got {n}")
    if arguments.random_bert:
        arguments.flags += ["--model_name_or_path", str(random_bert(arguments.random_bert))]
    rows = []
    for task, name in zip(TASKS, NAMES, strict=True):
        if not (ROOT / task).is_dir():  # of a course without this task
            continue
        if missing := open_in_script(ROOT, f"{task}/run_glue.py"):
            print(f"--- task {name}: not written yet: {', '.join(missing)}; the table ends here")
            break
        workers = 1 if task == TASKS[0] else n
        of_workers = f"{workers} worker{'s' if workers > 1 else ''}"
        print(f"--- task {name}: {of_workers}, {arguments.iterations} iterations", flush=True)
        run(task, workers, arguments)
        rows.append(read_row(task, name, workers))
    if rows:
        show(rows, n, arguments)
    if is_demo:
        show_two_workers()
    if step := next_step(load_course(), ROOT):
        print(step)


def show(rows: list[Rung], n: int, arguments: argparse.Namespace) -> None:
    """Print both tables and draw both pictures."""
    print(table(rows))
    on_nodes = f"{n} nodes with links of {arguments.rate}: here the number of bytes determines the time."
    print(on_nodes if arguments.nodes else LOOPBACK)
    path = ROOT / "runs" / "ladder.png"
    title = f"{n} workers, batch {arguments.batch}" + (f", {arguments.rate}" if arguments.nodes else "")
    names = [row.name.replace(" ", "\n", 1) for row in rows]
    bars(path, names, [row.seconds * 1000 for row in rows], label="time per iteration (ms)", title=title)
    print(f"bar chart: {path.relative_to(ROOT)}")
    print(times(rows))
    picture = path.with_name("ladder_timeline.png")
    draw_below_each_other([replace(shortest_step(row.timeline), title=f"task {row.name}") for row in rows], picture)
    zoom = f"{FOLDER.relative_to(ROOT)}/<task>/timeline.html"
    print(f"a step of each task: {picture.relative_to(ROOT)}; to zoom, open {zoom} in a browser")


def demo_flags(reason: str) -> list[str]:
    """The flags of the demo, where `reason` says why this machine cannot emulate nodes; "" if it can."""
    if not reason:
        return [*ON_NODES, "--", *TRAIN_ONLY]
    print(f"This machine cannot emulate nodes, so the demo cannot show what bytes cost: {reason}", flush=True)
    return []


def run(task: str, workers: int, arguments: argparse.Namespace) -> None:
    """Run one task as a student would. Its losses are in its record, so only what goes wrong is shown here."""
    batch = arguments.batch // workers
    flags = [
        *f"--max_steps {arguments.iterations} --per_gpu_train_batch_size {batch} --dropout 0 --timeline".split(),
        *("--output_dir", str(FOLDER / task), "--overwrite_output_dir"),
        *(["--no_cuda"] if arguments.nodes else no_cuda_for(arguments.workers)),  # all tasks on the same device
        *arguments.flags,
    ]
    command = [sys.executable, f"{task}/run_glue.py", *flags]
    if workers > 1 and arguments.nodes:
        command = on_nodes(workers, arguments.rate, command)
    elif workers > 1:
        command = [sys.executable, "-m", "cluster.launch", "--workers", str(workers), "--", *command[1:]]
    run_silently(task, command)


def read_row(task: str, name: str, workers: int) -> Rung:
    """The line of one task, from the records of all its workers."""
    records = [json.loads((FOLDER / task / f"rank{rank}.json").read_text()) for rank in range(workers)]
    losses = [[step["loss"] for step in record["iterations"]] for record in records]
    return Rung(
        name,
        [sum(step) / workers for step in zip(*losses, strict=True)],
        records[0]["evaluations"][-1]["metrics"]["acc"] if records[0]["evaluations"] else None,
        records[0]["seconds_per_iteration"],
        bytes_passed(records[0]),
        bytes_passed(records[-1]),
        read_trace(FOLDER / task / "timeline.json"),
    )


def bytes_passed(record: dict) -> float:
    """Bytes that a rank passes to collectives in one iteration. What crosses the network is the subject of task 4."""
    return sum(entry["bytes"] for entry in record["collectives"]) / len(record["iterations"])


def table(rows: list[Rung]) -> str:
    """All rows; times also as multiples of the last one, once that is DDP."""
    head = f"{'task':<20} {'first five losses (mean of workers)':<45} {'acc':>6} {'s/iter':>8} {'time/DDP':>8}"
    lines = ["", f"{'MB passed to collectives':>{len(head) + 25}}", f"{head} {'rank 0':>12} {'others':>11}"]
    for row in rows:
        losses = " ".join(f"{loss:.6f}" for loss in row.losses[:5])
        ratio = f"{row.seconds / rows[-1].seconds:8.2f}" if rows[-1].name == NAMES[-1] else f"{'-':>8}"
        accuracy = f"{'-':>6}" if row.accuracy is None else f"{row.accuracy:6.3f}"
        lines.append(
            f"{row.name:<20} {losses:<45} {accuracy} {row.seconds:8.4f} {ratio}"
            f" {row.bytes_of_first / 1e6:12.2f} {row.bytes_of_others / 1e6:11.2f}"
        )
    return "\n".join([*lines, ""])


def times(rows: list[Rung]) -> str:
    """Return a table of where the time of a step goes, in milliseconds; means over the ranks."""
    lines = [f"{'ms of a step, mean of ranks':<28}" + "".join(f"{name:>10}" for name in (*PARTS, "(hidden)"))]
    for row in rows:
        means = mean(parts(row.timeline))
        lines.append(f"{row.name:<28}" + "".join(f"{milliseconds(means[name], 1):>10}" for name in (*PARTS, "hidden")))
    return "\n".join(["", *lines, ""])


if __name__ == "__main__":
    exit_on_input_error(main)
