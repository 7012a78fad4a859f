"""The ladder in pictures: one step of 2a, 2b, 3, the pipeline and ZeRO-3, on emulated nodes.

    python -m cluster.demo.pictures [--rate 1gbit] [--only 2a 3]

Each picture is written next to the README that shows it. Each run uses --timeline and a model whose communication takes
about as long as its backward pass. The picture shows the shortest of three steps.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.demo.random_bert import random_bert
from cluster.emulate import bits_per_second, on_nodes, why_not
from cluster.launch import run_silently
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from common.timeline.boxes import Timeline, shortest_step
from common.timeline.parts import table
from common.timeline.picture import draw
from common.timeline.trace import read_trace

GLUE = ("--do_train", "--dropout", "0", "--learning_rate", "1e-5", "--per_gpu_train_batch_size", "2")


@dataclass(frozen=True)
class Picture:
    """A run on emulated nodes, and where its picture belongs. has_bert: it needs the larger BERT of `make demo`."""

    name: str
    title: str
    script: str
    flags: tuple[str, ...]
    nodes: int
    file: str
    has_bert: bool = True


PICTURES = (
    Picture("2a", "2a: gather and scatter", "task2a_gather_scatter/run_glue.py", GLUE, 4,
            "task2a_gather_scatter/timeline.png"),
    Picture("2b", "2b: all_reduce", "task2b_allreduce/run_glue.py", GLUE, 4, "task2b_allreduce/timeline.png"),
    Picture("3", "3: DDP", "task3_ddp/run_glue.py", GLUE, 4, "task3_ddp/timeline.png"),
    Picture("pipeline", "pipeline: two stages, 4 micro-batches", "pipeline/run_gpt2.py",
            ("--schedule", "gpipe", "--dropout", "0"), 2, "pipeline/timeline.png", has_bert=False),
    Picture("zero3", "ZeRO-3", "beyond/run_gpt2.py",
            ("--strategy", "zero3", "--batch_size", "16", "--dropout", "0"), 2, "beyond/timeline.png", has_bert=False),
)  # fmt: skip


def make(picture: Picture, rate: str) -> Timeline:
    """Run a picture's script on emulated nodes; return one step of its timeline."""
    folder = ROOT / "runs" / "pictures" / picture.name
    model = ["--model_name_or_path", str(random_bert("8M"))] if picture.has_bert else []
    flags = [*picture.flags, *model, "--timeline", "--max_steps", "6", "--output_dir", str(folder)]
    script = [sys.executable, picture.script, *flags, "--overwrite_output_dir"]
    run_silently(picture.script, on_nodes(picture.nodes, rate, script))
    step = shortest_step(read_trace(folder / "timeline.json"))
    return replace(step, title=f"{picture.title}, {picture.nodes} nodes, {in_words(rate)}")


def in_words(rate: str) -> str:
    """Return "1 Gbit/s" for tc's "1gbit"."""
    number, letter = rate[:-4], rate[-4:-3]
    return f"{number} {letter.upper() if letter in 'mg' else letter}bit/s" if rate.endswith("bit") else rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="rate of each node's link (%(default)s)")
    names = [picture.name for picture in PICTURES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="the pictures to make (all)")
    parser.add_argument("--into", type=Path, default=ROOT, help="write them below this folder (the repository)")
    arguments = parser.parse_args()
    if arguments.rate != "none":
        bits_per_second(arguments.rate)
    if reason := why_not():
        raise InputError(f"the pictures need emulated nodes: {reason}")
    for picture in PICTURES:
        if picture.name not in arguments.only:
            continue
        timeline = make(picture, arguments.rate)
        draw(timeline, arguments.into / picture.file)
        print(f"{picture.file}: {timeline.title}")
        print(table(timeline), flush=True)


if __name__ == "__main__":
    exit_on_input_error(main)
