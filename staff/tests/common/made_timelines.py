"""Timelines made by hand, for the tests: all_reduce after backward, with one slow rank; and buckets during backward."""

from common.timeline.boxes import Box, Step, Timeline, Wait


def after_backward(world_size: int = 4, steps: int = 3, slow: int = 2, run: str = "a1b2c3") -> Timeline:
    """Like task 2b: forward 20 ms, backward 40 ms (the slow rank: 60), one all_reduce of 30 ms, optimizer 10 ms."""
    boxes, marks = [], []
    for number in range(steps):
        begin = number * 0.125
        last = begin + 0.085
        for rank in range(world_size):
            ready = last if rank == slow else begin + 0.065
            end = last + 0.03
            waits = () if rank == slow else (Wait(ready, last, slow),)
            boxes += [
                Box(rank, "process", "data", begin, begin + 0.004),
                Box(rank, "process", "forward", begin + 0.005, begin + 0.025),
                Box(rank, "process", "backward", begin + 0.025, ready),
                Box(rank, "process", "communication", ready, end),
                Box(rank, "process", "optimizer", end, end + 0.01),
                Box(rank, "network", "all_reduce", ready, end, 4_000_000, waits),
            ]
            marks.append(Step(rank, number + 2, begin, begin + 0.125))
    return Timeline("all_reduce after backward", world_size, tuple(marks), tuple(boxes), 4e-5, run=run)


def during_backward() -> Timeline:
    """Like task 3: three buckets leave during backward; for the last one the process is blocked for 10 ms."""
    boxes, marks = [], []
    for rank in range(2):
        boxes += [
            Box(rank, "process", "forward", 0.0, 0.02),
            Box(rank, "process", "backward", 0.02, 0.06),
            Box(rank, "process", "communication", 0.06, 0.07),
            Box(rank, "process", "optimizer", 0.07, 0.08),
            Box(rank, "network", "all_reduce", 0.03, 0.045, 1000),
            Box(rank, "network", "all_reduce", 0.04, 0.055, 1000),
            Box(rank, "network", "all_reduce", 0.055, 0.07, 500),
        ]
        marks.append(Step(rank, 0, 0.0, 0.08))
    return Timeline("buckets during backward", 2, tuple(marks), tuple(boxes))
