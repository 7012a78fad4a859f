"""The pictures of the READMEs: one step of tasks 1 to 3, of the pipeline and of ZeRO-3; and those of drawings.py.

    python -m cluster.demo.pictures [--rate 1gbit] [--only 2a 3] [--redraw]

Each picture is written next to the README that shows it; tasks 1 to 3 have one time axis, and docs/one_step.png shows
them together. Each run is on emulated nodes, with --timeline and a model whose communication takes about as long as its
backward pass. The picture shows the shortest of three steps.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.demo.drawings import DRAWINGS
from cluster.demo.random_bert import random_bert
from cluster.emulate import bits_per_second, on_nodes, why_not
from cluster.launch import run_silently
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from common.timeline.boxes import Box, Timeline, shortest_step
from common.timeline.parts import table
from common.timeline.picture import UNIT, draw, draw_below_each_other
from common.timeline.trace import read_trace

GLUE = ("--do_train", "--dropout", "0", "--learning_rate", "1e-5", "--per_gpu_train_batch_size")
LADDER = ("1", "2a", "2b", "3")  # with one time axis


@dataclass(frozen=True)
class Picture:
    """A run on emulated nodes, and where its picture belongs; task 1 is in docs/one_step.png alone.

    of_blocks: the boxes on its network rows are named; its model is GPT-2, otherwise the larger BERT of `make demo`.
    """

    name: str
    title: str
    script: str
    flags: tuple[str, ...]
    nodes: int
    file: str = ""
    labels: tuple[str, ...] = ()
    of_blocks: bool = False


PICTURES = (
    Picture("1", "1: one worker", "task1_single/run_glue.py", (*GLUE, "8"), 1),
    Picture("2a", "2a: gather and scatter", "task2a_gather_scatter/run_glue.py", (*GLUE, "2"), 4,
            "task2a_gather_scatter/timeline.png"),
    Picture("2b", "2b: all_reduce", "task2b_allreduce/run_glue.py", (*GLUE, "2"), 4, "task2b_allreduce/timeline.png"),
    Picture("3", "3: DDP", "task3_ddp/run_glue.py", (*GLUE, "2"), 4, "task3_ddp/timeline.png"),
    Picture("pipeline", "pipeline, 4 micro-batches", "pipeline/run_gpt2.py",
            ("--schedule", "gpipe", "--dropout", "0"), 2, "pipeline/timeline.png", ("stage 0", "stage 1")),
    Picture("zero3", "ZeRO-3", "beyond/run_gpt2.py",
            ("--strategy", "zero3", "--batch_size", "16", "--dropout", "0"), 2, "beyond/timeline.png", of_blocks=True),
)  # fmt: skip


def make(picture: Picture, rate: str, redraw: bool) -> Timeline:
    """Run a picture's script, unless an earlier run is drawn again; return one step of its timeline."""
    folder = ROOT / "runs" / "pictures" / picture.name
    if not redraw:
        model = ["--model_name_or_path", str(random_bert("8M"))] if "run_glue" in picture.script else []
        flags = [*picture.flags, *model, "--timeline", "--max_steps", "6", "--output_dir", str(folder)]
        script = [sys.executable, picture.script, *flags, "--overwrite_output_dir"]
        run_silently(picture.script, on_nodes(picture.nodes, rate, script) if picture.nodes > 1 else script)
    step = shortest_step(read_trace(folder / "timeline.json"))
    if picture.of_blocks:
        step = with_blocks(step)
    place = f", {picture.nodes} nodes, {in_words(rate)}" if picture.nodes > 1 else ""
    return replace(step, title=picture.title + place, labels=picture.labels)


def in_words(rate: str) -> str:
    """Return "1 Gbit/s" for tc's "1gbit"."""
    number, letter = rate[:-4], rate[-4:-3]
    return f"{number} {letter.upper() if letter in 'mg' else letter}bit/s" if rate.endswith("bit") else rate


def with_blocks(timeline: Timeline) -> Timeline:
    """Name what ZeRO-3 sends in a step: G2 gathers block 2, S2 sends its gradients; r is the root.

    Forward gathers the root and the blocks. Backward begins with the last block, which is still there.
    """
    boxes: list[Box] = []
    for rank in range(timeline.world_size):
        own = sorted((box for box in timeline.boxes if box.rank == rank), key=lambda box: box.start)
        count = sum(box.name == "all_gather" for box in own) // 2
        forward = [str(block) for block in range(count)]
        names = {
            "all_gather": iter([f"G{block}" for block in ["r", *forward, *forward[-2::-1]]]),
            "all_to_all": iter([f"S{block}" for block in [*forward[::-1], "r"]]),
        }
        boxes += [replace(box, name=next(names[box.name])) if box.name in names else box for box in own]
    return replace(timeline, boxes=tuple(boxes))


def first_ranks(timeline: Timeline, count: int) -> Timeline:
    """Return a timeline without its later ranks."""
    steps = tuple(step for step in timeline.steps if step.rank < count)
    boxes = tuple(box for box in timeline.boxes if box.rank < count)
    return replace(timeline, world_size=min(count, timeline.world_size), steps=steps, boxes=boxes)


def draw_together(pictures: Sequence[Picture], arguments: argparse.Namespace) -> None:
    """Make some pictures, all with the time axis of the longest step."""
    made: dict[str, Timeline] = {}
    for picture in pictures:
        timeline = made[picture.name] = make(picture, arguments.rate, arguments.redraw)
        print(f"{timeline.title} {picture.file}\n{table(timeline)}", flush=True)
    longest = max((step.end for timeline in made.values() for step in timeline.steps), default=0.0)
    for picture in pictures:
        if picture.file:
            unit = 2 * UNIT if picture.of_blocks else UNIT
            draw(made[picture.name], arguments.into / picture.file, longest, unit)
    if made.keys() >= set(LADDER):
        draw_below_each_other([first_ranks(made[name], 2) for name in LADDER], arguments.into / "docs/one_step.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="rate of each node's link (%(default)s)")
    names = [*DRAWINGS, *(picture.name for picture in PICTURES)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="the pictures to make (all)")
    parser.add_argument("--into", type=Path, default=ROOT, help="write them below this folder (the repository)")
    parser.add_argument("--redraw", action="store_true", help="draw earlier runs again, without running anything")
    arguments = parser.parse_args()
    if arguments.rate != "none":
        bits_per_second(arguments.rate)
    for name, (draw_it, file) in DRAWINGS.items():
        if name in arguments.only:
            draw_it(arguments.into / file)
    chosen = [picture for picture in PICTURES if picture.name in arguments.only]
    if chosen and not arguments.redraw and (reason := why_not()):
        raise InputError(f"the pictures need emulated nodes: {reason}")
    draw_together([picture for picture in chosen if picture.name in LADDER], arguments)
    for picture in chosen:
        if picture.name not in LADDER:
            draw_together([picture], arguments)


if __name__ == "__main__":
    exit_on_input_error(main)
