"""Memory of activations in a pipeline under GPipe and 1F1B, measured and compared with what the schedule predicts.

    python -m benchmark.checks.activation_memory [--stages 4] [--micro_batches 4,8,16] [--plot beyond/activations.png]
    python -m benchmark.checks.activation_memory --batch 64 --micro_batches 4,16,32    # a given batch is divided

Every stage is a process of its own (gloo), with the lessons' runner (beyond/stage_runner.py). What backward will need
is counted with torch.autograd.graph.saved_tensors_hooks: each storage once, parameters left out. One micro-batch is
measured first; the schedule says how many of them are alive at once. Exit code 0 only if each measured peak is within
2 % of that many times one. The last line is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import sys
import weakref
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config, GPT2LMHeadModel

from benchmark.checks.ranks import on_ranks
from benchmark.measure.output import MB, text_table
from benchmark.names import numbers_of
from beyond.on_grid import SCHEDULES
from beyond.one_f_one_b import Action
from beyond.stage_runner import Stage, StageRunner
from common.config import RunConfig
from common.errors import InputError, exit_on_input_error
from common.figures import COLOURS, figure
from common.flags import check_at_least

WIDTH, LENGTH, ROWS, VOCABULARY = 128, 64, 2, 500
TOLERANCE = 0.02


@dataclass(frozen=True)
class Peak:
    """The most that a stage kept for backward, in bytes."""

    schedule: str
    micro_batches: int
    stage: int
    alive: int  # micro-batches at once, by the schedule
    expected: int  # bytes: alive times one micro-batch
    measured: int


class Kept:
    """One saved tensor; it counts until autograd drops it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedBytes:
    """Bytes of the distinct storages that autograd keeps for backward inside `with saved.hooks():`."""

    def __init__(self, parameters: set[int]) -> None:
        """parameters: addresses of storages that live anyway, and so are never new."""
        self.users = Counter(parameters)
        self.now = self.most = 0

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, lambda kept: kept.tensor)

    def pack(self, tensor: Tensor) -> Kept:
        kept, storage = Kept(tensor), tensor.untyped_storage()
        self.use(1, storage.data_ptr(), storage.nbytes())
        weakref.finalize(kept, self.use, -1, storage.data_ptr(), storage.nbytes())
        return kept

    def use(self, change: int, address: int, size: int) -> None:
        """One saved tensor more (change 1) or less (-1) is in this storage."""
        before, after = self.users[address], self.users[address] + change
        self.users[address] = after
        if not (before and after):
            self.now += change * size
            self.most = max(self.most, self.now)


def most_alive(actions: list[Action]) -> int:
    """How many micro-batches have had their forward and not their backward, at most."""
    alive = most = 0
    for action in actions:
        alive += 1 if action.kind == "forward" else -1
        most = max(most, alive)
    return most


def measure_stage(config: RunConfig, counts: list[int], batch: int | None) -> list[dict[str, Any]]:
    """One stage: a row for every schedule and number of micro-batches. batch: examples in all of them together."""
    stage, stages = config.rank, config.world_size
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": stages, "n_head": 4, "vocab_size": VOCABULARY}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model_config = GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)  # type: ignore[arg-type]
    group = dist.group.WORLD
    assert group is not None
    runner = StageRunner(Stage(GPT2LMHeadModel(model_config), stage, stages), group)
    parameters = {p.untyped_storage().data_ptr() for p in runner.stage.parameters()}
    tokens = torch.randint(VOCABULARY, (batch or max(counts) * ROWS, LENGTH))

    def peak(schedule: str, count: int, rows: int) -> tuple[int, int]:
        saved, actions = SavedBytes(parameters), SCHEDULES[schedule](count, stages, stage)
        with saved.hooks():
            runner.run(actions, tokens[: count * rows].chunk(count))
        return saved.most, most_alive(actions)

    found = []
    for schedule, count in product(SCHEDULES, counts):
        rows = batch // count if batch else ROWS
        one, _ = peak("gpipe", 1, rows)
        measured, alive = peak(schedule, count, rows)
        found.append(asdict(Peak(schedule, count, stage, alive, alive * one, measured)))
    return found


def measure(stages: int, counts: list[int], batch: int | None = None) -> list[Peak]:
    """Run all stages; rows in the order of schedule, micro-batches and stage."""
    rows = [Peak(**row) for rows in on_ranks(measure_stage, stages, counts=counts, batch=batch) for row in rows]
    return sorted(rows, key=lambda row: (row.schedule, row.micro_batches, row.stage))


def draw(path: Path, rows: list[Peak]) -> None:
    """Peak of each stage with the largest number of micro-batches, GPipe beside 1F1B."""
    count = max(row.micro_batches for row in rows)
    with figure(path) as axes:
        for place, (schedule, name, colour, hatch) in enumerate(
            (("gpipe", "GPipe", COLOURS[1], "//"), ("1f1b", "1F1B", COLOURS[0], ""))
        ):
            found = [row for row in rows if (row.schedule, row.micro_batches) == (schedule, count)]
            sizes = [row.measured / 1e6 for row in found]
            places = [row.stage + 0.4 * (place - 0.5) for row in found]
            bars = axes.bar(places, sizes, 0.38, color=colour, edgecolor="white", hatch=hatch, label=name)
            axes.bar_label(bars, [f"{row.alive}" for row in found], padding=2)
        axes.set(xlabel="stage", ylabel=f"activations, MB ({count} micro-batches)")
        axes.set_xticks(range(1 + max(row.stage for row in rows)))
        axes.legend(title="number: micro-batches alive", loc="upper left", ncols=2)
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4, help="processes, one for each stage (%(default)s)")
    parser.add_argument("--micro_batches", default="4,8,16", help="numbers of micro-batches (%(default)s)")
    parser.add_argument("--batch", type=int, help=f"examples in the whole batch (default: {ROWS} in each micro-batch)")
    parser.add_argument("--plot", type=Path, help="draw the figure into this PNG file")
    parser.add_argument("--quick", action="store_true", help="two stages, three micro-batches")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.stages, arguments.micro_batches = 2, "3"
    check_at_least(arguments, 1, "stages")
    counts, batch = numbers_of("--micro_batches", arguments.micro_batches), arguments.batch
    if batch is not None and any(batch < count or batch % count for count in counts):
        raise InputError(f"--batch: expected a multiple of {arguments.micro_batches}, got {batch}")
    rows = measure(arguments.stages, counts, batch)
    heads = ["schedule", "micro-batches", "stage", "alive", "expected MB", "measured MB"]
    cells = [
        [row.schedule, row.micro_batches, row.stage, row.alive, row.expected / MB, row.measured / MB] for row in rows
    ]
    print(text_table([heads, *cells]))
    if arguments.plot:
        draw(arguments.plot, rows)
    print(json.dumps([asdict(row) for row in rows]))
    sys.exit(any(not abs(row.measured / row.expected - 1) <= TOLERANCE for row in rows))


if __name__ == "__main__":
    exit_on_input_error(main)
