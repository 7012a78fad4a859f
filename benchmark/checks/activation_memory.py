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
from functools import partial
from itertools import product
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config, GPT2LMHeadModel

from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.checks.operations import everybody
from benchmark.checks.ranks import on_ranks
from benchmark.names import numbers_of
from beyond.on_grid import SCHEDULES
from beyond.one_f_one_b import Action
from beyond.stage_runner import Stage, StageRunner
from common.config import RunConfig
from common.errors import InputError, exit_on_input_error
from common.figures import COLOURS, figure
from common.flags import positive

WIDTH, LENGTH, ROWS, VOCABULARY = 128, 64, 2, 500
TOLERANCE = 0.02


class Kept:
    """One saved tensor; it counts until autograd drops it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.storage = tensor, tensor.untyped_storage()


class SavedBytes:
    """Bytes of the distinct storages that autograd keeps for backward inside `with saved.hooks():`, at most."""

    def __init__(self, parameters: set[int]) -> None:
        """parameters: addresses of storages that live anyway, and so do not count."""
        self.parameters, self.alive, self.most = parameters, WeakSet[Kept](), 0

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.pack, lambda kept: kept.tensor)

    def pack(self, tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        self.alive.add(kept)
        storages = {one.storage.data_ptr(): one.storage.nbytes() for one in self.alive}
        self.most = max(self.most, sum(size for place, size in storages.items() if place not in self.parameters))
        return kept


def most_alive(actions: list[Action]) -> int:
    """How many micro-batches have had their forward and not their backward, at most."""
    alive = most = 0
    for action in actions:
        alive += 1 if action.kind == "forward" else -1
        most = max(most, alive)
    return most


def measure_stage(config: RunConfig, counts: list[int], batch: int | None) -> list[Row]:
    """One stage: a row for every schedule and number of micro-batches. batch: examples in all of them together."""
    stage, stages = config.rank, config.world_size
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": stages, "n_head": 4, "vocab_size": VOCABULARY}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model_config = GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)  # type: ignore[arg-type]
    runner = StageRunner(Stage(GPT2LMHeadModel(model_config), stage, stages), everybody())
    parameters = {p.untyped_storage().data_ptr() for p in runner.stage.parameters()}
    tokens = torch.randint(VOCABULARY, (batch or max(counts) * ROWS, LENGTH))

    def peak(schedule: str, count: int, rows: int) -> tuple[int, int]:
        saved, actions = SavedBytes(parameters), SCHEDULES[schedule](count, stages, stage)
        with saved.hooks():
            runner.run(actions, tokens[: count * rows].chunk(count))
        return saved.most, most_alive(actions)

    measurements = []
    for schedule, count in product(SCHEDULES, counts):
        rows = batch // count if batch else ROWS
        one, _ = peak("gpipe", 1, rows)
        measured, alive = peak(schedule, count, rows)
        about = {"schedule": schedule, "micro-batches": count, "stage": stage, "alive": alive}
        holds = abs(measured / (alive * one) - 1) <= TOLERANCE
        measurements.append({**about, "expected MB": alive * one / 1e6, "measured MB": measured / 1e6, "holds": holds})
    return measurements


def measure(stages: int, counts: list[int], batch: int | None = None) -> list[Row]:
    """Run all stages; rows in the order of schedule, micro-batches and stage."""
    rows = [row for rows in on_ranks(measure_stage, stages, counts=counts, batch=batch) for row in rows]
    return sorted(rows, key=lambda row: (row["schedule"], row["micro-batches"], row["stage"]))


def draw(path: Path, rows: list[Row]) -> None:
    """Peak of each stage with the largest number of micro-batches, GPipe beside 1F1B."""
    count = max(row["micro-batches"] for row in rows)
    with figure(path) as axes:
        for place, (schedule, name, colour, hatch) in enumerate(
            (("gpipe", "GPipe", COLOURS[1], "//"), ("1f1b", "1F1B", COLOURS[0], ""))
        ):
            stage_rows = [row for row in rows if (row["schedule"], row["micro-batches"]) == (schedule, count)]
            sizes = [row["measured MB"] for row in stage_rows]
            places = [row["stage"] + 0.4 * (place - 0.5) for row in stage_rows]
            bars = axes.bar(places, sizes, 0.38, color=colour, edgecolor="white", hatch=hatch, label=name)
            axes.bar_label(bars, [str(row["alive"]) for row in stage_rows], padding=2)
        axes.set(xlabel="stage", ylabel=f"activations, MB ({count} micro-batches)")
        axes.set_xticks(range(1 + max(row["stage"] for row in rows)))
        axes.legend(title="number: micro-batches alive", loc="upper left", ncols=2)
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])


def activations(flags: argparse.Namespace) -> list[Row]:
    if flags.batch is not None and any(flags.batch % count for count in flags.micro_batches):
        raise InputError(f"--batch: expected a multiple of each of {flags.micro_batches}, got {flags.batch}")
    rows = measure(flags.stages, flags.micro_batches, flags.batch)
    if flags.plot:
        draw(flags.plot, rows)
    return rows


def main() -> None:
    parser = check_parser("checks.activation_memory", __doc__)
    add = parser.add_argument
    add("--stages", type=positive, default=4, help="processes, one for each stage (%(default)s)")
    add(
        "--micro_batches",
        type=partial(numbers_of, "--micro_batches"),
        default="4,8,16",
        help="their numbers (%(default)s)",
    )
    add("--batch", type=positive, help=f"examples in the whole batch (default: {ROWS} in each micro-batch)")
    add("--plot", type=Path, help="draw the figure into this PNG file")
    run_parts(parser, {"activations": activations}, stages=2, micro_batches=[3])


if __name__ == "__main__":
    exit_on_input_error(main)
