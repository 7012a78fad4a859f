"""The measured bubble of two equal partitions on two cores, beside (K-1)/(M+K-1).

    python -m benchmark.checks.pipeline_speed [--rounds 15] [--plot pipeline/bubble.png] [--quick]

The share of the workers' time in which they did nothing, from traces: the median over the rounds, with a bootstrap 95 %
interval, as a Markdown table. How fast a step is, is a row of benchmark.checks.timings (pipe). The last line is one
JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmark.measure.intervals import Interval, interval, shown
from benchmark.measure.machine import environment
from common.errors import exit_on_input_error
from common.figures import COLOURS, figure
from pipeline.partition import WithDevice
from pipeline.pipe import Pipe
from pipeline.timeline import Trace

STAGES = 2
WIDTH, LAYERS, ROWS = 1024, 2, 256  # of a stage; rows in one micro-batch. Large enough that the products take the time
COUNTS = [1, 2, 4, 8, 16]


def make_stage(seed: int) -> nn.Sequential:
    """WIDTH x WIDTH products, one after another; (rows, WIDTH) to (rows, WIDTH).

    LayerNorm has parameters before the first product, so that in the first stage too its input needs a gradient:
    without it that stage would have a quarter less to do in the backward, and the stages would not be equal.
    """
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def batch(micro_batches: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(micro_batches * ROWS, WIDTH)


def loss_of(output: Tensor, *_unused: Tensor) -> Tensor:
    """Costs next to nothing: it is no part of the stages. A sum, so that micro-batches add up to the batch."""
    return output.sum() / WIDTH


def make_pipe() -> tuple[Pipe, list[nn.Sequential]]:
    stages = [make_stage(seed) for seed in range(STAGES)]
    return Pipe(nn.Sequential(*(WithDevice(stage, f"cpu:{j}") for j, stage in enumerate(stages))), ROWS), stages


def ideal_bubble(micro_batches: int) -> float:
    return (STAGES - 1) / (micro_batches + STAGES - 1)


def draw_bubble(path: Path, counts: list[int], measured: list[Interval]) -> None:
    """The measured bubble with its intervals, and the ideal one."""
    middle = [found[0] for found in measured]
    below = [found[0] - (found[0] if found[1] is None else found[1]) for found in measured]
    above = [(found[0] if found[2] is None else found[2]) - found[0] for found in measured]
    with figure(path) as axes:
        axes.plot(counts, [ideal_bubble(m) for m in counts], "--", color=COLOURS[-1], label="(K-1) / (M+K-1)")
        axes.errorbar(counts, middle, [below, above], fmt="o-", color=COLOURS[0], capsize=4, label="measured")
        axes.set(xscale="log", xlabel="micro-batches M", ylabel=f"bubble, K={STAGES} partitions", ylim=(0, None))
        axes.set_xticks(counts, map(str, counts))
        axes.minorticks_off()
        axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["bubble"], help=argparse.SUPPRESS)  # there were other parts
    parser.add_argument("--rounds", type=int, default=15, help="steps for each number of micro-batches (%(default)s)")
    parser.add_argument("--plot", type=Path, help="draw the bubble into this PNG file")
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin, measured = environment(), []
    pipe, _ = make_pipe()
    print("| micro-batches M | (K-1)/(M+K-1) | measured bubble [95 %] |\n|---|---|---|", flush=True)
    for m in COUNTS:
        bubbles, x = [], batch(m)
        for _ in range(1 + (1 if arguments.quick else arguments.rounds)):
            pipe.trace = Trace()
            loss_of(pipe(x)).backward()
            bubbles.append(pipe.trace.bubble)
        measured.append(interval(bubbles[1:]))
        print(f"| {m} | {ideal_bubble(m):.3f} | {shown(measured[-1])} |", flush=True)
    if arguments.plot is not None:
        draw_bubble(arguments.plot, COUNTS, measured)
    print(json.dumps({"bubble": dict(zip(COUNTS, measured, strict=True)), "environment": begin}))


if __name__ == "__main__":
    exit_on_input_error(main)
