"""The schedule of a pipeline (region p.2): which partition works on which micro-batch, and when.

4 micro-batches and 3 partitions; a cell holds the number of the micro-batch (`python -m common.schedule 4 3`):

    clock        0  1  2  3  4  5
    partition 0  0  1  2  3  .  .
    partition 1  .  0  1  2  3  .
    partition 2  .  .  0  1  2  3

Source: GPipe (Huang et al., 2019), section 2.3; the clock cycles as in torchgpipe (Kim et al., 2020), section 3.2.1.
"""

import sys
from collections.abc import Iterable

from common.errors import InputError, exit_on_input_error
from common.grid import draw_schedule


def _clock_cycles(num_batches: int, num_partitions: int) -> Iterable[list[tuple[int, int]]]:
    """Return, for every clock cycle, the (micro-batch, partition) pairs that work at the same time, in any order.

    Steps
    [1] Count the clock cycles: the last micro-batch starts num_batches - 1 cycles after the first, and then it
        passes through all partitions.
    [2] In cycle k, partition j works on micro-batch k - j, which partition j - 1 computed one cycle earlier.
    [3] Leave out the pairs whose micro-batch does not exist. There the partition is idle: this is the bubble.
    [4] Return a list of lists, or yield one list per cycle, each a new list.
    """
    # TODO(cos598d) p.2: list the pairs of every clock cycle, micro-batch first (4 lines)
    # BEGIN SOLUTION p.2
    for clock in range(num_batches + num_partitions - 1):
        first = max(0, clock - num_batches + 1)  # partitions before it have finished their last micro-batch
        last = min(clock, num_partitions - 1)  # partitions after it have not been given anything yet
        yield [(clock - partition, partition) for partition in range(first, last + 1)]
    # END SOLUTION p.2


def main() -> None:
    """Draw the schedule: python -m common.schedule MICRO_BATCHES PARTITIONS."""
    numbers = sys.argv[1:]
    if len(numbers) != 2 or not all(text.isdigit() and int(text) > 0 for text in numbers):
        raise InputError(f"expected two whole numbers, micro-batches and partitions, got {numbers}; for example: 4 3")
    print(draw_schedule(_clock_cycles(int(numbers[0]), int(numbers[1]))))


if __name__ == "__main__":
    exit_on_input_error(main)
