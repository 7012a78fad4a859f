"""Time an operation on a link, alone, from a link that has been idle.

A shaped link lets a burst through first, and idle time gives it back.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from benchmark.measure.machine import interface_bytes

SMALL = 4096  # up to this size, calls are timed in a row: one takes less than the workers are apart
IN_A_ROW = 8
REFILL_SECONDS = 0.006  # a link of 100 Mbit/s gets its burst back in 5 ms
LEAST, MOST = 3, 40  # repeats

Operation = Callable[[], object]


def operations(size: int, workers: int, rank: int, group: dist.ProcessGroup) -> dict[str, Operation]:
    """Return the operations for a worker that hands in `size` bytes, by the names of the flight recorder.

    exchange: send to the right neighbour and receive from the left, a round of a ring. hop: to another worker and back.
    """
    count = max(1, size // 4)
    one, other = torch.zeros(count), torch.zeros(count)
    padded = torch.zeros(-(-count // workers) * workers)
    received, all_parts = torch.empty_like(padded), torch.zeros(count * workers)
    right, left = (rank + 1) % workers, (rank - 1) % workers

    def exchange() -> None:
        both = [dist.P2POp(dist.isend, one, right, group), dist.P2POp(dist.irecv, other, left, group)]
        for transfer in dist.batch_isend_irecv(both):
            transfer.wait()

    def hop() -> None:  # there and back
        for sender in (0, 1):
            if rank == sender:
                dist.send(one, 1 - sender, group)
            elif rank == 1 - sender:
                dist.recv(other, sender, group)

    return {
        "all_reduce": lambda: dist.all_reduce(one, group=group),
        "all_gather": lambda: dist.all_gather_single(all_parts, one, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, padded, group=group),
        "exchange": exchange,
        "hop": hop,
    }


def measure_one(
    operation: Operation, ways: int, size: int, budget: float, shaped: bool, group: dist.ProcessGroup
) -> tuple[float, float, float | None]:
    """Return seconds, processor seconds and bytes sent of one call; `ways`: how many calls follow one another in it."""
    in_a_row = IN_A_ROW if size <= SMALL else 1
    operation()  # makes connections
    first, _ = timed(operation, 1, shaped, group)
    agreed = slowest([first], group)[0]
    repeats = max(LEAST, min(MOST, int(budget / ((agreed + REFILL_SECONDS * shaped) * in_a_row + 1e-3))))
    before = interface_bytes()
    runs = [timed(operation, in_a_row, shaped, group) for _ in range(repeats)]
    dist.barrier(group)  # a send returns while its bytes still wait in the link's queue, behind which this one comes
    after = interface_bytes()
    if before is not None:
        for _ in range(repeats + 1):
            dist.barrier(group)
    of_barriers = interface_bytes()
    moved = None
    if before is not None and after is not None and of_barriers is not None:
        moved = max(0, (after - before) - (of_barriers - after))
    seconds = slowest([run[0] for run in runs], group)
    calls = in_a_row * ways
    wire = None if moved is None else moved / (repeats * in_a_row)  # of a hop's two ways, this worker sends one
    busy = float(np.median([run[1] for run in runs]))
    # Over a shaped link, a lone message takes its bytes' time or up to twice that, when one direction waits for the
    # other. So the fastest run counts.
    return float(min(seconds) if shaped else np.median(seconds)) / calls, busy / calls, wire


def timed(operation: Operation, in_a_row: int, shaped: bool, group: dist.ProcessGroup) -> tuple[float, float]:
    """Return seconds and processor seconds of this worker, its threads included; all workers begin together."""
    if shaped:
        time.sleep(REFILL_SECONDS)
    dist.barrier(group)
    begin, busy = time.perf_counter(), time.process_time()
    for _ in range(in_a_row):
        operation()
    return time.perf_counter() - begin, time.process_time() - busy


def slowest(seconds: list[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the largest figures of all workers, place by place."""
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values.tolist()
