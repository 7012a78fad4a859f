"""The messages of a ring's all_reduce, one by one, for as many workers as a run draws: no table holds them all."""

from collections import Counter


def messages_of_each(workers: int) -> list[int]:
    """Return how many pieces each worker sends to its right neighbour, with one piece beginning at each of them."""
    sent = Counter[int]()
    for piece in range(workers):
        at = piece
        for _ in ("until all workers have added to it", "until all workers have the sum"):
            seen = {at}
            while len(seen) < workers:
                sent[at] += 1
                at = (at + 1) % workers
                seen.add(at)
    return [sent[worker] for worker in range(workers)]
