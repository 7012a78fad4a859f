"""Small training loops on real gloo with a Record, for the tests of --timeline: FOLDER/{scene}/rank{r}.json and more.

    python -m staff.tests.common.timeline_ranks FOLDER WORLD_SIZE SCENE...

Ranks are slow by agreement: a slow one sleeps only when the others are known to be in their collective.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.arguments import parse_gpt2_arguments
from common.record import Record
from common.timeline import clocks
from common.workers.collectives import turn_on_recorder
from common.workers.process_group import Worker
from staff.tests.common.forked_ranks import on_ranks

SIZE, LAYERS, STEPS = 256, 8, 6
SLEEP = 0.3  # seconds
SLOW = 1  # the slow rank


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(LAYERS)])


def train(scene: str, rank: int, world_size: int, folder: Path) -> None:
    """A few steps; the scene says how gradients are averaged, and who is slow."""
    words = ["--timeline", "2", "--output_dir", str(folder / scene), "--overwrite_output_dir", "--batch_size", "12"]
    words += ["--world_size", str(world_size), "--local_rank", str(rank), "--max_steps", str(STEPS)]
    config = parse_gpt2_arguments("scene", words)
    record = Record(config, Worker(rank, world_size))
    model = build()
    record.describe(model, 12, 0)
    if scene == "buckets":
        model = DistributedDataParallel(model, bucket_cap_mb=0.3)
    loader = [torch.randn(12, SIZE, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]
    store = dist.distributed_c10d._get_default_store()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in record.epochs(loader):
        for number, batch in enumerate(record.iterations(loader)):
            with record.phase("forward"):
                loss = model(batch).square().mean()
            with record.phase("backward"):
                loss.backward()
                if scene == "slow" and rank == SLOW and number in (2, 3):  # the steps that are shown
                    store.wait([f"entered {number} {other}" for other in range(world_size) if other != SLOW])
                    time.sleep(SLEEP)
            with record.phase("communication"):
                if scene != "buckets":
                    store.set(f"entered {number} {rank}", "")
                    average(model, scene)
            with record.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            record.loss(loss.item())
    record.write()


def average(model: nn.Module, scene: str) -> None:
    group = dist.group.WORLD if scene != "groups" else GROUPS[dist.get_rank()]
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


GROUPS: dict[int, dist.ProcessGroup] = {}  # rank -> its group, in the scene "groups"


def compare_clocks(rank: int, folder: Path) -> None:
    """Ranks on machines of their own: the clock of rank r is r seconds ahead of that of rank 0."""
    found = clocks.read_clocks(torch.device("cpu"), f"machine {rank}", lambda: time.time() + rank)
    if rank == 0:
        torch.save(found, folder / "clocks.pt")


def main() -> None:
    folder, world_size, scenes = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]

    def work(rank: int) -> None:
        turn_on_recorder()
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{folder}/join", rank=rank, world_size=world_size)
        for scene in scenes:
            if scene == "clocks":
                compare_clocks(rank, folder)
                continue
            if scene == "groups":
                for parity in (0, 1):
                    group = dist.new_group([r for r in range(world_size) if r % 2 == parity])
                    if rank % 2 == parity:
                        GROUPS[rank] = group
            train(scene, rank, world_size, folder)
            dist.barrier()
        dist.destroy_process_group()

    on_ranks(world_size, work)


if __name__ == "__main__":
    main()
