"""How large a bucket of gradients should be, from what the link and the backward pass of this run take.

Gradients pass two stages, backward and the network, and a bucket is what is handed from one to the other:

    backward |  1  |  2  |  3  |              T seconds for all gradients
    network        |   1   |   2   |   3   |  C seconds for all gradients, and a for each message

The slower stage works without a break, but for one piece of the other one: the network waits for the first bucket, or
the last bucket, which nothing can hide, follows the end of backward. With n buckets a step of both takes

    max(T, C)  +  min(T, C) / n  +  n a

Few large buckets make the second term large, many small ones the third. The sum is least where the two are equal:
n = sqrt(min(T, C) / a).
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

PROBE_BYTES = 4 * 2**20  # much more than an emulated link lets through in one burst
REPEATS = 5


@dataclass(frozen=True)
class Costs:
    """Seconds: of a backward pass that sends nothing (T), of any message (a), of a further byte in it."""

    backward: float
    message: float
    byte: float

    def __str__(self) -> str:
        return (
            f"backward {self.backward * 1e3:.1f} ms, a message {self.message * 1e3:.3f} ms "
            f"and {self.byte * 1e9:.2f} ms for each MB"
        )


def bucket_bytes(gradient_bytes: int, costs: Costs) -> int:
    """The size of a bucket for gradients of so many bytes: all of them in n equal buckets."""
    network = costs.byte * gradient_bytes
    count = max(1, round(math.sqrt(min(costs.backward, network) / costs.message)))
    return math.ceil(gradient_bytes / count)


def measure(backward: Callable[[], None], device: torch.device) -> Costs:
    """Time `backward` and the link: the slowest rank's medians, so all ranks get the same. A collective.

    An all_reduce of one number is all latency; what a longer one takes beyond it, it takes for its bytes. So the
    number of workers and the algorithm are in the figure, and nobody needs to know the rate of the link.
    """
    number, long = (torch.zeros(size, device=device) for size in (1, PROBE_BYTES // 4))
    message = median_seconds(lambda: dist.all_reduce(number), device)
    whole = median_seconds(lambda: dist.all_reduce(long), device)
    own = Costs(median_seconds(backward, device), message, max(0.0, whole - message) / PROBE_BYTES)
    slowest = torch.tensor(astuple(own), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # ranks with different buckets would wait for each other forever
    return Costs(*slowest.tolist())


def median_seconds(action: Callable[[], object], device: torch.device) -> float:
    """The median of some runs after a first one, which makes connections and buffers."""
    seconds = []
    for _ in range(1 + REPEATS):
        wait_for(device)
        begin = time.perf_counter()
        action()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a GPU still computes after the call has returned
