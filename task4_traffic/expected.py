"""From the model and the algorithm, compute how many bytes a worker must send and receive; nothing here is measured.

    python task4_traffic/expected.py --world_size 4                     the tiny BERT on the embedded sample
    python task4_traffic/expected.py --world_size 4 --rate 1gbit        and the shortest time in which they can be sent
    python task4_traffic/expected.py --world_size 4 --examples 2490 --grad_dtype bf16 --model_name_or_path FOLDER

S: bytes of all gradients of one iteration, N: number of workers. README.md in this folder explains the regions.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch
import transformers
from torch import nn

from common.errors import InputError, exit_on_input_error
from common.flags import burst_bytes, link_rate
from common.models.load import model_path

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = (64, 32, 16)  # examples in one iteration of all workers together


class Traffic(NamedTuple):
    """Bytes that one worker sends and receives."""

    sent: float
    received: float


def gradient_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return S, the bytes of all gradients of one iteration when they are sent as `dtype`.

    4.2  After a backward pass of `model`:
         [1] count the elements of every gradient that exists; a tensor that two layers share counts once,
         [2] multiply by the bytes of one element of `dtype`.
    """
    # TODO(cos598d) 4.2: elements of all gradients times the bytes of one element (about 2 lines)
    # BEGIN SOLUTION 4.2
    elements = sum(parameter.grad.numel() for parameter in model.parameters() if parameter.grad is not None)
    return elements * torch.empty((), dtype=dtype).element_size()
    # END SOLUTION 4.2


def all_reduce_traffic(size: int, world_size: int) -> Traffic:
    """Return what every worker sends and receives when a ring reduces tensors of `size` bytes.

    4.2  [3] In how many rounds does a worker send a piece, and how large is a piece? It receives as much. A piece may
         be a fraction of a byte long; you may round the result to whole bytes.
    """
    # TODO(cos598d) 4.2: rounds of the ring times the bytes of a piece (about 2 lines)
    # BEGIN SOLUTION 4.2
    moved = 2 * (world_size - 1) * size / world_size
    return Traffic(sent=moved, received=moved)
    # END SOLUTION 4.2


def gather_scatter_traffic(size: int, world_size: int, rank: int) -> Traffic:
    """Return what `rank` sends and receives when rank 0 gathers tensors of `size` bytes and scatters their means.

    4.2  [4] Rank 0 sends to all others and receives from all others; each of them communicates only with rank 0.
    """
    # TODO(cos598d) 4.2: how many tensors does this rank send, and how many does it receive? (about 2 lines)
    # BEGIN SOLUTION 4.2
    partners = world_size - 1 if rank == 0 else 1
    return Traffic(sent=partners * size, received=partners * size)
    # END SOLUTION 4.2


def iterations_per_epoch(examples: int, batch_size: int, world_size: int) -> int:
    """Return the number of steps of an epoch.

    The sampler pads to the same number of examples on every worker; the last batch may be short.

    Args:
        examples: number of examples in the whole training set.
        batch_size: batch size of one worker.
    """
    # TODO(cos598d) 4.2: [5] examples of one worker, and the batches they fill (1-2 lines)
    # BEGIN SOLUTION 4.2
    return math.ceil(math.ceil(examples / world_size) / batch_size)
    # END SOLUTION 4.2


def traffic_per_epoch(iteration: Traffic, examples: int, batch_size: int, world_size: int) -> Traffic:
    """Return what a worker sends and receives in a whole epoch, given the traffic of one iteration. [6]"""
    # TODO(cos598d) 4.2: multiply the traffic of one iteration by the number of iterations (about 2 lines)
    # BEGIN SOLUTION 4.2
    iterations = iterations_per_epoch(examples, batch_size, world_size)
    return Traffic(iteration.sent * iterations, iteration.received * iterations)
    # END SOLUTION 4.2


def example_model(name: str) -> nn.Module:
    """Return the model with the gradients of one artificial example; only their sizes matter."""
    path = model_path(name, "bert")
    model = transformers.BertForSequenceClassification(transformers.BertConfig.from_pretrained(path, num_labels=2))
    ids = torch.ones(1, 8, dtype=torch.long)  # (B, T)
    model(input_ids=ids, labels=torch.zeros(1, dtype=torch.long)).loss.backward()
    return model


def seconds(traffic: Traffic, rate: float, burst: int = 0) -> float:
    """Return the shortest time in which a link of `rate` bits per second each way can carry the bytes of a worker.

    burst: bytes that the link lets through at full speed after a pause, as links of emulated nodes do.
    """
    return 8 * max(0.0, max(traffic) - burst) / rate


def prediction(size: int, world_size: int, rate: float) -> str:
    """Return one line per algorithm: the shortest time in which the slowest worker can communicate in one iteration."""
    ring, root = all_reduce_traffic(size, world_size), gather_scatter_traffic(size, world_size, 0)
    burst = burst_bytes(rate)
    # Rank 0 scatters only after it has gathered: its two directions are not busy at the same time.
    rows = {
        "all_reduce": (seconds(ring, rate), seconds(ring, rate, burst)),
        "gather + scatter": (2 * seconds(root, rate), seconds(root, rate, burst)),
    }
    lines = [f"  {name:<17} {plain:.4f} s; on emulated nodes {least:.4f} s" for name, (plain, least) in rows.items()]
    return "\n".join(
        [
            f"\nat {rate / 1e6:,.0f} Mbit/s, the communication of an iteration takes at least",
            *lines,
            f"(An emulated link lets {burst:,} bytes through at full speed after a pause, in each direction. With",
            "gather and scatter, one direction pauses while the other one is busy.)",
        ]
    )


def table(size: int, world_size: int, examples: int) -> str:
    """Return a table for rank 0 and another rank, by algorithm and batch size."""
    lines = [
        f"{'batch':>5} {'iterations':>10}  {'algorithm':<16} {'rank':<6} {'sent per iteration':>19} {'per epoch':>18}"
    ]
    for batch in BATCHES:
        worker_batch = max(1, batch // world_size)
        steps = iterations_per_epoch(examples, worker_batch, world_size)
        for name, rank, each in (
            ("all_reduce", "any", all_reduce_traffic(size, world_size)),
            ("gather + scatter", "0", gather_scatter_traffic(size, world_size, 0)),
            ("gather + scatter", "others", gather_scatter_traffic(size, world_size, 1)),
        ):
            epoch = traffic_per_epoch(each, examples, worker_batch, world_size)
            lines.append(f"{batch:>5} {steps:>10}  {name:<16} {rank:<6} {each.sent:>19,.0f} {epoch.sent:>18,.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default="tiny", help="a BERT (%(default)s)")
    parser.add_argument("--world_size", type=int, default=4, help="number of workers (%(default)s)")
    parser.add_argument(
        "--examples", type=int, default=2560, help="examples in the training set (%(default)s: the sample; RTE: 2490)"
    )
    parser.add_argument("--grad_dtype", choices=DTYPES, default="fp32")
    rate = "rate of a worker's link, such as 1gbit; used to predict the communication time"
    parser.add_argument("--rate", type=link_rate, help=rate)
    arguments = parser.parse_args()
    if arguments.world_size < 2:
        raise InputError(f"--world_size: expected 2 or more, got {arguments.world_size}: one worker sends nothing")
    size = gradient_bytes(example_model(arguments.model_name_or_path), DTYPES[arguments.grad_dtype])
    print(
        f"{size:,} bytes of gradients per iteration as {arguments.grad_dtype}; {arguments.world_size} workers; "
        "the table is in bytes\n"
    )
    print(table(size, arguments.world_size, arguments.examples))
    if arguments.rate:
        print(prediction(size, arguments.world_size, arguments.rate))


if __name__ == "__main__":
    exit_on_input_error(main)
