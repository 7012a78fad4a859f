"""Predict the time of a step before it runs, from a few numbers that are easy to measure.

    python beyond/cost_model.py --bytes 90e6 --workers 4 --rate 1gbit --latency 50us --backward 0.3 --buckets 8

A message of S bytes takes `latency + S / bandwidth` seconds. The latency is what even an empty message costs. The
bandwidth is the number of bytes that a link carries per second in each direction, both at the same time. A ring of N
workers sends 2(N-1) messages one after another, each with 1/N of the bytes. If rank 0 gathers and scatters instead, the
messages to or from different workers are under way at the same time, but rank 0's own link carries all their bytes.

With overlap, backward and the network work at the same time. Here, each bucket has to wait for the one before it:

    time        0        1        2        3        4        5        6
    backward    |------- ▲ ------ ▲ ------ ▲|                               ▲  a bucket is complete
    network              |== bucket 0 ==|== bucket 1 ==|== bucket 2 ==|
    exposed                                |.........................|     what the step still waits for

Source of the model: Hockney, "The communication challenge for MPP", 1994.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder

from common.errors import InputError, exit_on_input_error
from common.flags import link_rate


@dataclass(frozen=True)
class Link:
    """A worker's connection. latency: seconds of an empty message; bandwidth: bytes per second, each way."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Return how long a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class TimedBucket:
    """Gradients that travel together. Both times are in seconds.

    ready: when its last gradient is complete, from the beginning of backward. communication: how long its all_reduce
    takes.
    """

    ready: float
    communication: float


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step and of its communication.

    The exposed part makes a step longer. In this model, the hidden part does not. On CPUs sending takes processor time,
    so computing takes longer while a message is under way; the model leaves this out.
    """

    total: float
    exposed: float
    hidden: float


def ring_all_reduce_seconds(size: float, workers: int, link: Link) -> float:
    """Return the seconds of an all_reduce of `size` bytes in a ring; 0 with one worker.

    b.15 [1] How many rounds are there? In each, a worker sends one piece and receives another at the same time.
         [2] How large is a piece? Add up the messages of one worker.
    """
    # TODO(cos598d) b.15: [1] and [2] count the rounds, and add up the messages of one worker (about 2 lines)
    # BEGIN SOLUTION b.15
    rounds = 2 * (workers - 1)
    return rounds * link.seconds(size / workers)
    # END SOLUTION b.15


def gather_scatter_seconds(size: float, workers: int, link: Link) -> float:
    """Return the seconds of a gather of `size` bytes from each worker and a scatter of the mean; 0 with one worker.

    b.15 [3] Rank 0 receives from every other worker, then sends to every other worker. In each of the two, all messages
             start at the same time, so their latencies overlap; their bytes queue for rank 0's own link.
    """
    # TODO(cos598d) b.15: [3] the seconds of a gather and of a scatter (1-3 lines)
    # BEGIN SOLUTION b.15
    if workers == 1:
        return 0.0
    return 2 * link.seconds((workers - 1) * size)
    # END SOLUTION b.15


def step_time(forward: float, backward: float, optimizer: float, buckets: Sequence[TimedBucket]) -> StepTime:
    """Return the time of a step in which the buckets travel during backward.

    buckets: listed in the order in which they are sent; may be empty. Without overlap, every bucket is ready when
    backward ends.

    b.16 [1] The network carries one bucket at a time, in order. The all_reduce of a bucket begins when this bucket is
             ready and the all_reduce before it has ended. When does the last one end?
         [2] The exposed time is the communication time that remains after the end of backward; it is never negative.
         [3] A step consists of forward, backward, the exposed time, and the optimizer.
         [4] The hidden time is all communication that is not exposed.
    """
    # TODO(cos598d) b.16: [1] to [4] when the last bucket arrives, then the parts of the step (about 8 lines)
    # BEGIN SOLUTION b.16
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready) + bucket.communication
    exposed = max(0.0, end - backward)
    communication = sum(bucket.communication for bucket in buckets)
    total = sum((forward, backward, exposed, optimizer))
    return StepTime(total, exposed, communication - exposed)
    # END SOLUTION b.16


def equal_buckets(count: int, backward: float, size: float, workers: int, link: Link) -> list[TimedBucket]:
    """Return `count` buckets of equal size that become ready at equal intervals; the last one when backward ends."""
    seconds = ring_all_reduce_seconds(size / count, workers, link)
    return [TimedBucket(backward * (number + 1) / count, seconds) for number in range(count)]


def table(size: float, workers: int, link: Link, backward: float, forward: float, counts: Sequence[int]) -> str:
    """Return a line for each way to average the gradients."""
    apart = {
        "gather + scatter": gather_scatter_seconds(size, workers, link),
        "all_reduce after backward": ring_all_reduce_seconds(size, workers, link),
    }
    lines = [f"{'':<28}{'step':>10}{'exposed':>10}{'hidden':>10}   seconds"]
    rows = {name: [TimedBucket(backward, seconds)] for name, seconds in apart.items()}
    rows |= {
        f"{count} buckets during backward": equal_buckets(count, backward, size, workers, link) for count in counts
    }
    for name, buckets in rows.items():
        step = step_time(forward, backward, 0.0, buckets)
        lines.append(f"{name:<28}{step.total:>10.4f}{step.exposed:>10.4f}{step.hidden:>10.4f}")
    return "\n".join(lines)


def seconds(text: str) -> float:
    """Return the seconds of a time such as 50us, 0.2ms or 0.001s."""
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        duration = float(text.removesuffix(unit)) * units[unit]
    except (ValueError, KeyError):
        duration = -1.0
    if not 0 <= duration < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a time such as 50us or 0.2ms, got {text!r}")
    return duration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=90e6, help="size of all gradients in bytes (%(default)g)")
    parser.add_argument("--workers", type=int, default=4, help="number of workers (%(default)s)")
    parser.add_argument("--rate", type=link_rate, default=1e9, help="rate of a link, such as 1gbit (1gbit)")
    parser.add_argument("--latency", type=seconds, default=50e-6, help="latency of a message, such as 50us (50us)")
    parser.add_argument("--forward", type=float, default=0.1, help="seconds of the forward pass (%(default)s)")
    parser.add_argument("--backward", type=float, default=0.2, help="seconds of the backward pass (%(default)s)")
    parser.add_argument(
        "--buckets", type=int, nargs="*", default=[2, 4, 8, 16, 64], help="numbers of buckets to compare"
    )
    arguments = parser.parse_args()
    if arguments.workers < 1 or not arguments.bytes > 0 or min(arguments.buckets, default=1) < 1:
        got = f"{arguments.workers}, {arguments.bytes:g} and {arguments.buckets}"
        raise InputError(f"--workers, --bytes and --buckets: expected numbers above 0, got {got}")
    if not (arguments.forward >= 0 and arguments.backward >= 0):
        got = f"{arguments.forward:g} and {arguments.backward:g}"
        raise InputError(f"--forward and --backward: expected seconds, 0 or more, got {got}")
    link = Link(arguments.latency, arguments.rate / 8)
    print(table(arguments.bytes, arguments.workers, link, arguments.backward, arguments.forward, arguments.buckets))


if __name__ == "__main__":
    exit_on_input_error(main)
