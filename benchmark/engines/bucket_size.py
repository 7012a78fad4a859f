"""How large a bucket of gradients should be, from what the link and the backward pass of this run take.

Gradients pass two stages, backward and the network, and a bucket is what is handed from one to the other:

    backward |  1  |  2  |  3  |              T seconds for all gradients
    network        |   1   |   2   |   3   |  C seconds for all gradients, and t for each message

If the network is the slower stage, it waits for the first bucket and then carries one after another; otherwise the last
bucket follows the end of backward. So with n equal buckets both stages take the longer of

    T/n + C + n t        least for n = sqrt(T/t)
    T + C/n + t          shorter with every further bucket, until n = (T - C)/t, where the two are equal

The best n is the larger of sqrt(T/t) and (T - C)/t. But a message also takes processor time, p seconds, and backward
gets that much longer: T + n p instead of T. On CPUs this is what limits n where T is larger than C. So the sizes are
compared with this model, and no formula is solved.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

PROBE_BYTES = 4 * 2**20  # much more than an emulated link lets through in one burst
SMALL = 1000  # numbers; of fewer than about 2N, gloo sends less than a whole ring
MOST_BUCKETS = 1000
REPEATS = 5


@dataclass(frozen=True)
class Costs:
    """Seconds: of a backward pass that sends nothing (T), of any message (t), of a further byte in it.

    processor: the processor time of any message (p).
    """

    backward: float
    message: float
    byte: float
    processor: float = 0.0

    def __str__(self) -> str:
        return (
            f"backward {self.backward * 1e3:.1f} ms, a message {self.message * 1e3:.3f} ms "
            f"({self.processor * 1e3:.3f} ms of a processor) and {self.byte * 1e9:.2f} ms for each MB"
        )


def step_seconds(count: int, gradient_bytes: int, costs: Costs) -> float:
    """Return how long backward and the network take with `count` equal buckets."""
    backward = costs.backward + count * costs.processor
    bucket = costs.message + costs.byte * gradient_bytes / count
    return max(backward / count + count * bucket, backward + bucket)


def bucket_bytes(gradient_bytes: int, costs: Costs) -> int:
    """The size of a bucket for gradients of so many bytes: all of them in n equal buckets."""
    count = min(range(1, MOST_BUCKETS + 1), key=lambda count: step_seconds(count, gradient_bytes, costs))
    return math.ceil(gradient_bytes / count)


def measure(backward: Callable[[], None], device: torch.device) -> Costs:
    """Time `backward` and the link: the slowest rank's medians, so all ranks get the same. A collective.

    A short all_reduce is all latency; what a longer one takes beyond it, it takes for its bytes. So the number of
    workers and the algorithm are in the figure, and nobody needs to know the rate of the link.
    """
    short, long = (torch.zeros(size, device=device) for size in (SMALL, PROBE_BYTES // 4))
    begin = time.process_time()
    message = median_seconds(lambda: dist.all_reduce(short), device)
    processor = (time.process_time() - begin) / (1 + REPEATS)
    whole = median_seconds(lambda: dist.all_reduce(long), device)
    byte = max(0.0, whole - message) / PROBE_BYTES
    own = Costs(median_seconds(backward, device), message, byte, min(processor, message))
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
