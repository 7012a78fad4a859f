"""Judges how many messages of gradients a rank has in transit: the broker sees when each is posted and waited for."""

from collections.abc import Callable, Sequence

from grader.grading import Grade
from grader.ranks.calls import Call

MOST, COPIES = 2, 3  # COPIES of a message in transit: what is sent, what is received, the grader's answer before wait()


def check(
    grade: Grade, where: str, sends: Sequence[tuple[int, Call]], sizes: Sequence[int], name: Callable[[int], str]
) -> None:
    """sends: (piece, call) of a rank. A piece (-1: none) may travel in several calls. sizes: elements of each piece."""
    for piece, call in sends:
        alive = {other for other, earlier in sends if other >= 0 and earlier.in_transit(call)}
        if len(alive) > MOST:
            gradients = sum(sizes[other] for other in alive)
            grade.fail(
                f"{where} sends {name(piece)} ({call.where}) while the messages of {len(alive) - 1} others are in "
                f"transit: {len(alive)} messages with {gradients} of {sum(sizes)} gradients are in memory; expected at "
                f"most {MOST}: receive the oldest, then send the next one"
            )
