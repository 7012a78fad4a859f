"""What is predicted: one strategy, one model, so many workers with so many examples each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """batch: examples of one worker. bucket_bytes: of own_overlap; the others have their own sizes."""

    strategy: str
    model: str
    workers: int
    batch: int
    length: int = 64
    bucket_bytes: int = 4 * 2**20
