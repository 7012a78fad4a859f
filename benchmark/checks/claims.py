"""Check sentences of the READMEs about communication by measuring what they say.

    python -m benchmark.checks.claims [--only buckets,late] [--quick]

buckets    DDP sends one bucket in the first iteration; later, a bucket closes once it has reached its size
no_sync    with backward alone inside no_sync(), DDP sends the gradients
buffers    DDP broadcasts its buffers before the first forward that follows a backward, and not before each forward
unused     a parameter without a gradient stops DDP in the next forward
order      calls in different orders: wrong numbers if the sizes are equal, a crash if they are not
late       no rank finishes a gather before the last one has called it, but data travels earlier
burst      an emulated link lets a short message through faster than its rate
frames     bytes over payload: below half a percent at 1 Gbit/s, about 5 % at 250 Mbit/s
units      an all_reduce sends two units, an all_gather and an all_to_all one, Gloo's reduce_scatter two
beside     computing takes longer beside a collective
fp16       dividing by the number of workers before sending makes more fp16 gradients subnormal

Claims about an interface need emulated nodes, and are skipped with the reason where there are none. --quick leaves out
`beside`. The last line of stdout is one JSON object; exit code 0 if all others hold.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmark.checks.check import Row, SkippedError, check_parser, run_parts
from benchmark.checks.operations import time_operations
from benchmark.checks.ranks import on_ranks
from benchmark.measure.machine import interface_bytes
from cluster.emulate import bits_per_second
from common.config import RunConfig
from common.errors import exit_on_input_error
from common.flags import burst_bytes
from common.workers.collectives import recorded
from task4_traffic.expected import example_model

MIB = 2**20
Verdict = tuple[bool, str]
Result = dict[str, object]  # of a rank


def stack(layers: int, width: int) -> nn.Sequential:
    """Linear layers, and a buffer, as BERT has for its position ids."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    model.register_buffer("positions", torch.zeros(8))
    return model


def sent(name: str, action: Callable[[], object]) -> list[int]:
    """The bytes of each collective of this name that an action makes; those of DDP are among them."""
    before = len(recorded())
    action()
    return [collective.bytes for collective in recorded()[before:] if collective.name == name]


def train(model: nn.Module, width: int) -> None:
    """A forward and a backward."""
    model(torch.ones(1, width)).sum().backward()


def buckets(config: RunConfig) -> Verdict:
    """The bytes of DDP's buckets in the first and in the third iteration: 12 parameters of 10 MB."""
    ddp = DistributedDataParallel(stack(12, 1600))
    steps = [[round(size / MIB, 1) for size in sent("all_reduce", lambda: train(ddp, 1600))] for _ in range(3)]
    first, _, later = steps
    holds = len(first) == 1 and later[0] > 1 and max(later[1:]) > 25 and len(later) > 2
    return holds, f"first iteration {first} MiB, later {later}"


def no_sync(config: RunConfig) -> Verdict:
    """How many buckets are sent if backward alone, or forward as well, is inside no_sync()."""
    ddp = DistributedDataParallel(stack(4, 64))
    train(ddp, 64)
    loss = ddp(torch.ones(1, 64)).sum()
    with ddp.no_sync():
        backward_alone = len(sent("all_reduce", loss.backward))
        both = len(sent("all_reduce", lambda: train(ddp, 64)))
    observation = f"buckets sent: {backward_alone} with backward alone, {both} with forward as well"
    return backward_alone > 0 == both, observation


def buffers(config: RunConfig) -> Verdict:
    """How often DDP broadcasts its buffers: in four forwards without gradients, then in each of two training steps."""
    ddp = DistributedDataParallel(stack(2, 16))

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(4):
                ddp(torch.ones(1, 16))

    for _ in range(2):  # the second one also agrees on new buckets
        train(ddp, 16)
    counts = [len(sent("broadcast", action)) for action in (evaluate, lambda: train(ddp, 16), lambda: train(ddp, 16))]
    return counts == [1, 0, 1], f"broadcasts in evaluation and two steps: {counts}"


def unused(config: RunConfig) -> Verdict:
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
                return (step, where) == (1, "forward"), f"error in {where} of step {step}"
    return False, "no error"


def _first_layer_only(ddp: DistributedDataParallel) -> Tensor:
    model = ddp.module
    forward = model.forward
    model.forward = model[0].forward
    loss = ddp(torch.ones(1, 16)).sum()
    model.forward = forward
    return loss


def in_different_orders(config: RunConfig, size: int) -> Result:
    """Two ranks all_reduce 1,000 1s and `size` 10s in different orders: what each of them gets, if it gets anything."""
    ones, tens = torch.full((1000,), 1.0), torch.full((size,), 10.0)
    for tensor in (ones, tens) if config.rank == 0 else (tens, ones):
        dist.all_reduce(tensor)
    return {"ones": ones[0].item(), "tens": tens[0].item()}


def order() -> Verdict:
    equal = on_ranks(in_different_orders, 2, size=1000)
    unequal = on_ranks(in_different_orders, 2, size=100_000, may_fail=True)
    wrong = all(result == {"ones": 11.0, "tens": 11.0} for result in equal)
    observation = f"equal sizes: {equal[0]} for 2 and 20; different sizes: {len(unequal)} of 2 ranks come to an end"
    return wrong and len(unequal) < 2, observation


def early_bytes(config: RunConfig) -> Result:
    """The bytes that this rank has sent and received 1 s before the last rank calls gather, and after it."""
    rank, tensor = dist.get_rank(), torch.ones(2_500_000)
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if rank == 0 else None
    dist.barrier()
    before, halfway = interface_bytes() or 0, list[int]()
    look = threading.Timer(1.0, lambda: halfway.append((interface_bytes() or 0) - before))
    look.start()
    if rank == dist.get_world_size() - 1:
        time.sleep(2.0)
    dist.gather(tensor, everyone, dst=0)
    look.join()
    return {"early": halfway[0], "bytes": tensor.nbytes}


def late() -> Verdict:
    results = on_ranks(early_bytes, 4, "1gbit")
    early = [result["early"] / 1e6 for result in results]
    observation = "MB sent before the last rank's call: " + ", ".join(f"{size:.1f}" for size in early)
    return min(early[1], early[2]) > 0.5 * results[0]["bytes"] / 1e6 > early[3], observation


def burst() -> Verdict:
    size, rate = 100_000, bits_per_second("100mbit") / 8
    seconds, _ = on_ranks(time_operations, 2, "100mbit", names=["message"], size=size)[0]["message"]
    plain, least = size / rate, (size - burst_bytes(8 * rate)) / rate
    observation = f"{seconds * 1e3:.1f} ms; {plain * 1e3:.1f} by the rate, {least * 1e3:.1f} with the burst"
    return least <= seconds < plain, observation


def units_sent(names: list[str], nodes: int, rate: str) -> dict[str, float]:
    """Bytes out of the interface over (N-1)/N of all bytes, for collectives of 8 MB."""
    size = 8_000_000
    measured = on_ranks(time_operations, nodes, rate, names=names, size=size)[0]
    whole = dict.fromkeys(names, size) | {"all_gather": nodes * size}  # whose `size` is that of a part
    return {name: sent / (whole[name] * (nodes - 1) / nodes) for name, (_, sent) in measured.items()}


def frames() -> Verdict:
    shares = {rate: units_sent(["all_reduce"], 2, rate)["all_reduce"] / 2 for rate in ("1gbit", "300mbit", "250mbit")}
    holds = shares["1gbit"] < 1.005 and shares["300mbit"] < 1.005 and 1.04 < shares["250mbit"] < 1.06
    return holds, "bytes over payload: " + ", ".join(f"{rate} {share:.3f}" for rate, share in shares.items())


def units() -> Verdict:
    expected = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 1}
    sent = units_sent(list(expected), 4, "1gbit")
    observation = ", ".join(f"{name} {sent[name]:.2f}" for name in expected)
    return all(abs(sent[name] / units - 1) < 0.02 for name, units in expected.items()), f"units: {observation}"


def slowed_computing(config: RunConfig) -> Result:
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


def beside() -> Verdict:
    results = on_ranks(slowed_computing, 2, "1gbit")
    ratios = [result["ratio"] for result in results]
    holds = sum(ratios) > len(ratios) and all(result["under_way"] for result in results)
    return holds, "computing takes " + " and ".join(f"{ratio:.2f}" for ratio in ratios) + " times as long"


def fp16() -> Verdict:
    """Of the tiny BERT's gradients that are not zero, the share below fp16's smallest normal number."""
    torch.manual_seed(0)
    model = example_model("tiny")
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).abs()
    gradients = gradients[gradients > 0]
    least = torch.finfo(torch.float16).smallest_normal
    before, after = ((gradients / divisor < least).float().mean().item() for divisor in (1, 4))
    return after > before, f"subnormal or zero in fp16: {before:.0%}, divided by 4 {after:.0%}"


CLAIMS: dict[str, Callable[..., Verdict]] = {
    claim.__name__: claim
    for claim in (buckets, no_sync, buffers, unused, order, late, burst, frames, units, beside, fp16)
}
JUDGED_BY_RANK = ("buckets", "no_sync", "buffers", "unused")  # on each of two ranks; rank 0's verdict counts


def check(name: str, flags: argparse.Namespace) -> list[Row]:
    if flags.quick and name == "beside":
        raise SkippedError("beside other programs, its seconds say nothing")
    holds, observation = on_ranks(CLAIMS[name], 2)[0] if name in JUDGED_BY_RANK else CLAIMS[name]()
    return [{"measured": observation, "holds": holds}]


def main() -> None:
    run_parts(check_parser("checks.claims", __doc__), {name: partial(check, name) for name in CLAIMS})


if __name__ == "__main__":
    exit_on_input_error(main)
