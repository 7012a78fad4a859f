"""What a sharded checkpoint costs with torch.distributed.checkpoint, beside save and load of the survive lesson.

    python -m benchmark.checks.checkpoint_cost [--workers 4] [--megabytes 100]

Each rank has its part of one tensor. Times are medians on rank 0, without the first save and the first load. MB and
files are what all ranks have written.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from benchmark.checks.check import Row, check_parser, run_parts
from benchmark.checks.ranks import on_ranks
from beyond.storage import Folder, State
from beyond.survive import load, save
from common.config import RunConfig
from common.errors import exit_on_input_error
from common.flags import positive


def seconds(action: Callable[[int], object], repeats: int) -> float:
    times = []
    for step in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        action(step)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def measure_rank(config: RunConfig, elements: int, repeats: int) -> list[Row]:
    """Return a row for the lesson's checkpoint, and one for torch's. Times are in seconds."""
    start = time.perf_counter()
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    imported, folder = time.perf_counter() - start, config.output_dir
    shard, lengths = torch.randn(elements), {"values": elements * config.world_size}
    state = {"values": DTensor.from_local(shard.clone(), init_device_mesh("cpu", (config.world_size,)), [Shard(0)])}
    ours, theirs = Folder(folder / "lesson"), folder / "dcp"
    actions: list[tuple[Callable[[int], object], Callable[[int], object]]] = [
        (lambda step: save(ours, State(step, {"values": shard}, lengths)), lambda _: load(ours)),
        (lambda _: dcp.save(state, checkpoint_id=theirs), lambda _: dcp.load(state, checkpoint_id=theirs)),
    ]
    rows = list[Row]()
    for i, (name, path) in enumerate({"this lesson": ours.folder, "torch.distributed.checkpoint": theirs}.items()):
        row: Row = {"with": name, "import s": imported * i}
        row |= {"save s": seconds(actions[i][0], repeats), "load s": seconds(actions[i][1], repeats)}
        files = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
        rows.append(row | {"MB": sum(files) / 1e6, "files": len(files)})
    return rows


def measure(flags: argparse.Namespace) -> list[Row]:
    elements = flags.megabytes * 250_000 // flags.workers
    return on_ranks(measure_rank, flags.workers, elements=elements, repeats=flags.repeats)[0]


def main() -> None:
    parser = check_parser("checks.checkpoint_cost", __doc__)
    parser.add_argument("--workers", type=positive, default=4, help="processes (%(default)s)")
    parser.add_argument("--megabytes", type=positive, default=100, help="of the tensor (%(default)s)")
    parser.add_argument("--repeats", type=positive, default=5, help="saves and loads that are timed (%(default)s)")
    run_parts(parser, {"checkpoints": measure}, workers=2, megabytes=1, repeats=1)


if __name__ == "__main__":
    exit_on_input_error(main)
