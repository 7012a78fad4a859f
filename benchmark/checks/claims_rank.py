"""One rank of benchmark.checks.claims: measures what one claim says, and writes it to FOLDER/result_{rank}.json.

    python benchmark/checks/claims_rank.py CLAIM FOLDER --master_ip ... --master_port ... --world_size N --local_rank R

Each function is called on all ranks, in a gloo group. What it returns is written as JSON.
"""

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it starts as a script, on every node

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.paths import atomic_write
from common.workers.collectives import CollectiveLog, turn_on_recorder
from common.workers.process_group import choose_interface
from task4_traffic.counters import KERNEL, read_kernel

MIB = 2**20
Result = dict[str, object]


def stack(layers: int, width: int) -> nn.Sequential:
    """Linear layers, and a buffer, as BERT has for its position ids."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    model.register_buffer("positions", torch.zeros(8))
    return model


def wrapped(model: nn.Module) -> tuple[DistributedDataParallel, list[int]]:
    """The model in DDP, and a list that gets the bytes of each bucket that is sent."""
    ddp, sent = DistributedDataParallel(model), list[int]()

    def note(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, note)
    return ddp, sent


def buckets() -> Result:
    """The bytes of DDP's buckets in the first and in the third iteration: 12 parameters of 10 MB."""
    ddp, sent = wrapped(stack(12, 1600))
    steps = []
    for _ in range(3):
        sent.clear()
        ddp(torch.ones(1, 1600)).sum().backward()
        steps.append(list(sent))
    return {"first": steps[0], "later": steps[2]}


def no_sync() -> Result:
    """How many buckets are sent if backward alone, or forward as well, is inside no_sync()."""
    ddp, sent = wrapped(stack(4, 64))
    ddp(torch.ones(1, 64)).sum().backward()
    sent.clear()
    loss = ddp(torch.ones(1, 64)).sum()
    with ddp.no_sync():
        loss.backward()
    backward_alone = len(sent)
    sent.clear()
    with ddp.no_sync():
        ddp(torch.ones(1, 64)).sum().backward()
    return {"backward_alone": backward_alone, "both": len(sent)}


def buffers() -> Result:
    """How often DDP broadcasts its buffers: in four forwards without gradients, then in each of two training steps."""
    ddp, log = DistributedDataParallel(stack(2, 16)), CollectiveLog()

    def broadcasts(action: Callable[[], object]) -> int:
        before = log.total.get("broadcast", 0)
        action()
        log.drain()
        return log.total.get("broadcast", 0) - before

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(4):
                ddp(torch.ones(1, 16))

    def step() -> None:
        ddp(torch.ones(1, 16)).sum().backward()

    log.drain()
    for _ in range(2):  # the second one also agrees on new buckets
        broadcasts(step)
    return {"evaluation": broadcasts(evaluate), "steps": [broadcasts(step), broadcasts(step)]}


def unused() -> Result:
    """In which step DDP complains about a parameter that has got no gradient, and where."""
    model = stack(2, 16)
    ddp = DistributedDataParallel(model)
    for step in range(2):
        for where in ("forward", "backward"):
            try:
                if where == "forward":
                    loss = ddp(torch.ones(1, 16)).sum() if step else _first_layer_only(ddp)
                else:
                    loss.backward()
            except RuntimeError:
                return {"step": step, "where": where}
    return {"step": None, "where": None}


def _first_layer_only(ddp: DistributedDataParallel) -> Tensor:
    model = ddp.module
    forward = model.forward
    model.forward = model[0].forward
    loss = ddp(torch.ones(1, 16)).sum()
    model.forward = forward
    return loss


def order_equal() -> Result:
    """Two ranks all_reduce 1s and 10s of one size in different orders: what each of them gets."""
    ones, tens = torch.full((1000,), 1.0), torch.full((1000,), 10.0)
    for tensor in (ones, tens) if dist.get_rank() == 0 else (tens, ones):
        dist.all_reduce(tensor)
    return {"ones": ones[0].item(), "tens": tens[0].item()}


def order_unequal() -> Result:
    """The same with two sizes. One rank ends in an error or is killed; this function does not return everywhere."""
    small, large = torch.ones(1000), torch.ones(100_000)
    for tensor in (small, large) if dist.get_rank() == 0 else (large, small):
        dist.all_reduce(tensor)
    return {"small": small[0].item(), "large": large[0].item()}


def late() -> Result:
    """The bytes that this rank has sent and received 1 s before the last rank calls gather, and after it."""
    rank, tensor = dist.get_rank(), torch.ones(2_500_000)
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if rank == 0 else None
    dist.barrier()
    before, halfway = eth0(), list[int]()
    look = threading.Timer(1.0, lambda: halfway.append(eth0() - before))
    look.start()
    if rank == dist.get_world_size() - 1:
        time.sleep(2.0)
    dist.gather(tensor, everyone, dst=0)
    look.join()
    return {"early": halfway[0], "all": eth0() - before, "bytes": tensor.nbytes}


def eth0() -> int:
    """The bytes that this node has sent."""
    return read_kernel(KERNEL.read_text())["eth0"][1]


def burst() -> Result:
    """The seconds of 100 kB from rank 0 to rank 1 after a pause, the shortest of ten."""
    tensor, taken = torch.ones(25_000), []
    for _ in range(10):
        dist.barrier()
        time.sleep(0.05)
        begin = time.perf_counter()
        dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)
        taken.append(time.perf_counter() - begin)
    return {"seconds": min(taken), "bytes": tensor.nbytes}


def frames() -> Result:
    """Bytes out of the interface over the payload, for each collective of 8 MB."""
    n, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.ones(2_000_000)
    part, other = torch.ones(len(whole) // n), torch.empty_like(whole)
    unit = whole.nbytes * (n - 1) / n
    found: Result = {}
    for name, call in {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(other, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }.items():
        call()
        dist.barrier()
        time.sleep(0.1)
        before = eth0()
        call()
        time.sleep(0.1)  # for the last acknowledgements
        found[name] = (eth0() - before) / unit
        dist.barrier()
    return found | {"rank": rank}


def beside() -> Result:
    """How many times as long computing takes beside a collective that is under way: the median of interleaved pairs."""
    matrix, message = torch.ones(384, 384), torch.ones(25_000_000)

    def compute() -> float:
        begin = time.perf_counter()
        for _ in range(60):
            matrix @ matrix
        return time.perf_counter() - begin

    ratios = []
    for _ in range(15):
        dist.barrier()
        alone = compute()
        work = dist.all_reduce(message, async_op=True)
        assert work is not None
        together = compute()
        ratios.append(together / alone)
        still_under_way = not work.is_completed()
        work.wait()
        message.fill_(1.0)
    return {"ratio": statistics.median(ratios), "under_way": still_under_way}


CLAIMS = {
    f.__name__: f for f in (buckets, no_sync, buffers, unused, order_equal, order_unequal, late, burst, frames, beside)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=CLAIMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--master_ip", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, required=True)
    parser.add_argument("--world_size", type=int, required=True)
    parser.add_argument("--local_rank", type=int, required=True)
    a = parser.parse_args()
    torch.set_num_threads(1)
    turn_on_recorder()
    choose_interface(a.master_ip)
    dist.init_process_group(
        "gloo", f"tcp://{a.master_ip}:{a.master_port}", datetime.timedelta(seconds=30), a.world_size, a.local_rank
    )
    result = CLAIMS[a.claim]()
    with atomic_write(a.folder / f"result_{a.local_rank}.json") as file:
        json.dump(result, file)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a group that has lost a rank would wait for it


if __name__ == "__main__":
    main()
