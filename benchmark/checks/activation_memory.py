"""Memory of activations in a pipeline under GPipe and 1F1B, measured and compared with what the schedule predicts.

    python -m benchmark.checks.activation_memory [--stages 4] [--micro_batches 4,8,16] [--plot beyond/activations.png]

Every stage is a process of its own (gloo), with the lessons' runner (beyond/stage_runner.py). What backward will need
is counted with torch.autograd.graph.saved_tensors_hooks: each storage once, parameters left out. One micro-batch is
measured first; the schedule says how many of them are alive at once. Exit code 0 only if each measured peak is within
2 % of that many times one. The last line is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config, GPT2LMHeadModel

from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.checks.ranks import on_ranks
from benchmark.measure.bars import Bar, draw_bars
from benchmark.names import numbers_of
from beyond.on_grid import SCHEDULES
from beyond.stage_runner import Stage, StageRunner
from common.config import RunConfig
from common.errors import exit_on_input_error
from common.flags import positive

WIDTH, LENGTH, ROWS, VOCABULARY = 128, 64, 2, 500
TOLERANCE = 0.02


class Saved:
    """A tensor that autograd keeps for backward; it is alive until autograd drops it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.storage = tensor, tensor.untyped_storage()


def most_saved(action: Callable[[], object], parameters: set[int]) -> int:
    """Return the bytes of the distinct storages that autograd keeps during the action, at most; without parameters."""
    alive, most = WeakSet[Saved](), 0

    def save(tensor: Tensor) -> Saved:
        nonlocal most
        saved = Saved(tensor)
        alive.add(saved)
        storages = {one.storage.data_ptr(): one.storage.nbytes() for one in alive}
        most = max(most, sum(size for place, size in storages.items() if place not in parameters))
        return saved

    with saved_tensors_hooks(save, lambda saved: saved.tensor):
        action()
    return most


def measure_stage(config: RunConfig, counts: list[int]) -> list[Row]:
    """One stage: a row for every schedule and number of micro-batches."""
    stage, stages = config.rank, config.world_size
    torch.manual_seed(0)
    sizes: Row = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": stages, "n_head": 4, "vocab_size": VOCABULARY}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model, group = GPT2LMHeadModel(GPT2Config(**sizes)), dist.new_group()
    runner = StageRunner(Stage(model, stage, stages), group)
    parameters = {p.untyped_storage().data_ptr() for p in runner.stage.parameters()}
    tokens = torch.randint(VOCABULARY, (max(counts) * ROWS, LENGTH))

    def peak(schedule: str, count: int) -> tuple[int, int]:
        """Bytes, and the micro-batches that have had their forward and not their backward, at most."""
        actions = SCHEDULES[schedule](count, stages, stage)
        most = most_saved(lambda: runner.run(actions, tokens[: count * ROWS].chunk(count)), parameters)
        return most, max(accumulate(1 if action.kind == "forward" else -1 for action in actions))

    measurements, (one, _) = [], peak("gpipe", 1)
    for schedule in SCHEDULES:
        for count in counts:
            measured, alive = peak(schedule, count)
            about: Row = {"schedule": schedule, "micro-batches": count, "stage": stage, "alive": alive}
            about |= {"expected MB": alive * one / 1e6, "measured MB": measured / 1e6}
            measurements.append(about | {"holds": abs(measured / (alive * one) - 1) <= TOLERANCE})
    return measurements


def measure(flags: argparse.Namespace) -> list[Row]:
    """Run all stages; rows in the order of schedule, micro-batches and stage."""
    counts = flags.micro_batches
    by_stage = on_ranks(measure_stage, flags.stages, counts=counts)
    rows = [row for of_all_stages in zip(*by_stage, strict=True) for row in of_all_stages]
    if flags.plot:
        names = {"gpipe": "GPipe", "1f1b": "1F1B"}
        most = [row for row in rows if row["micro-batches"] == max(counts)]
        bars = [Bar(f"stage {row['stage']}", names[row["schedule"]], row["measured MB"]) for row in most]
        draw_bars(flags.plot, bars, "activations, MB", f"{max(counts)} micro-batches", list(names.values()))
    return rows


def main() -> None:
    parser, numbers = check_parser("checks.activation_memory", __doc__), partial(numbers_of, "--micro_batches")
    add = parser.add_argument
    add("--stages", type=positive, default=4, help="processes, one for each stage (%(default)s)")
    add("--micro_batches", type=numbers, default="4,8,16", help="their numbers (%(default)s)")
    add("--plot", type=Path, help="draw the figure into this PNG file")
    run_parts(parser, {"activations": measure}, stages=2, micro_batches=[3])


if __name__ == "__main__":
    exit_on_input_error(main)
