"""Sentences about PyTorch in the READMEs and in docs/how_pytorch_communicates.md, executed; and the checks' commands.

Each function of CLAIMS runs on two ranks, which are started once for all of them.
"""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
import common.workers.environment  # isort: skip  # noqa: F401

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmark.checks.activation_memory import measure
from beyond.cost_model import TimedBucket, step_time
from common.arguments import parse_worker_arguments
from common.workers.collectives import recorded, turn_on_recorder
from staff.tests.workers import group
from task4_traffic.expected import example_model

MIB = 2**20


def stack(layers: int, width: int) -> nn.Sequential:
    """Linear layers, and a buffer, as BERT has for its position ids."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    model.register_buffer("positions", torch.zeros(8))
    return model


def train(model, width):
    model(torch.ones(1, width)).sum().backward()


def sent(name, action):
    """The bytes of each collective of this name that an action makes; those of DDP are among them."""
    before = len(recorded())
    action()
    return [collective.bytes for collective in recorded()[before:] if collective.name == name]


def buckets(rank):
    ddp = DistributedDataParallel(stack(4, 1600))  # 10 MB each
    first, _, later = [sent("all_reduce", lambda: train(ddp, 1600)) for _ in range(3)]
    return {"first": len(first), "later": [round(size / MIB) for size in later]}


def no_sync(rank):
    ddp = DistributedDataParallel(stack(4, 64))
    train(ddp, 64)
    loss = ddp(torch.ones(1, 64)).sum()
    with ddp.no_sync():
        backward_alone = len(sent("all_reduce", loss.backward))
        both = len(sent("all_reduce", lambda: train(ddp, 64)))
    return {"backward alone is sent": backward_alone > 0, "forward and backward are sent": both > 0}


def buffers(rank):
    """How often DDP broadcasts its buffers: in four forwards without gradients, then in each of two training steps."""
    ddp = DistributedDataParallel(stack(2, 16))

    def evaluate():
        with torch.no_grad():
            for _ in range(4):
                ddp(torch.ones(1, 16))

    for _ in range(2):  # the second one also agrees on new buckets
        train(ddp, 16)
    return [len(sent("broadcast", action)) for action in (evaluate, lambda: train(ddp, 16), lambda: train(ddp, 16))]


class OneOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def unused(rank):
    """Where DDP complains about a parameter that has got no gradient."""
    ddp = DistributedDataParallel(OneOfTwo())
    ddp(torch.ones(1, 4)).sum().backward()  # no complaint yet
    try:
        ddp(torch.ones(1, 4))
    except RuntimeError:
        return "in the next forward"
    return "nowhere"


def order(rank):
    """Two ranks all_reduce 1s and 10s in different orders."""
    ones, tens = torch.full((1000,), 1.0), torch.full((1000,), 10.0)
    for tensor in (ones, tens) if rank == 0 else (tens, ones):
        dist.all_reduce(tensor)
    return {"ones": ones[0].item(), "tens": tens[0].item()}


CLAIMS = {  # what is done -> what the text says that it gives
    buckets: {"first": 1, "later": [10, 29]},  # one until the first step has ended; later one closes at 1 MiB, then 25
    no_sync: {"backward alone is sent": True, "forward and backward are sent": False},
    buffers: [1, 0, 1],  # in the first forward after a backward
    unused: "in the next forward",
    order: {"ones": 11.0, "tens": 11.0},  # wrong numbers, and no error
}


def main():
    config = parse_worker_arguments("claims")
    turn_on_recorder()
    address = f"tcp://{config.master_ip}:{config.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=config.rank, world_size=config.world_size)
    config.output_dir.mkdir(exist_ok=True)
    seen = {claim.__name__: claim(config.rank) for claim in CLAIMS}
    (config.output_dir / f"rank{config.rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("claims")
    assert group(Path(__file__), 2, folder) == [0, 0], (folder / "log0.txt").read_text()[-2000:]
    return json.loads((folder / "run" / "rank0.json").read_text())


@pytest.mark.medium
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_what_the_documentation_says_about_ddp_and_gloo_is_so(seen, claim):
    assert seen[claim.__name__] == CLAIMS[claim]


def test_dividing_before_sending_makes_more_fp16_gradients_subnormal():
    torch.manual_seed(0)
    gradients = torch.cat([p.grad.flatten() for p in example_model("tiny").parameters() if p.grad is not None]).abs()
    gradients = gradients[gradients > 0]

    subnormal = [
        (gradients / divisor < torch.finfo(torch.float16).smallest_normal).float().mean() for divisor in (1, 4)
    ]

    assert [round(share.item(), 2) for share in subnormal] == [0.14, 0.31]  # task 4's README: dividing first makes more


@pytest.mark.parametrize(("backward", "network", "message"), [(0.3, 0.1, 1e-3), (0.25, 0.74, 1e-3), (0.4, 0.39, 0.01)])
def test_the_number_of_buckets_on_the_page_of_overlap_is_the_best_by_the_model_of_b_16(backward, network, message):
    def exposed(count):
        """What a step waits for with equal buckets, whose gradients come evenly."""
        each = message + network / count
        buckets = [TimedBucket(backward * number / count, each) for number in range(1, count + 1)]
        return step_time(0.0, backward, 0.0, buckets).exposed

    rule = max(math.sqrt(backward / message), (backward - network) / message)

    assert exposed(round(rule)) <= 1.01 * min(exposed(count) for count in range(1, 400, 3))


@pytest.mark.proof
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow_and_gpipe_keeps_all():
    rows = measure(Namespace(stages=2, micro_batches=[3], plot=None))

    alive = [(row["schedule"], row["stage"], row["alive"]) for row in rows]
    assert alive == [("gpipe", 0, 3), ("gpipe", 1, 3), ("1f1b", 0, 2), ("1f1b", 1, 1)]
    assert all(row["holds"] for row in rows), rows


if __name__ == "__main__":
    main()
