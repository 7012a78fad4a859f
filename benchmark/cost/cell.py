"""What is predicted: a step of one strategy and one model, by so many workers with so many examples each."""

from dataclasses import dataclass

from benchmark.strategies import STRATEGIES
from common.config import Grid


@dataclass(frozen=True)
class Cell:
    """batch: examples of one worker. bucket_bytes: of own_overlap; the others have their own sizes.

    rate: of the link; None: loopback. latency: its further latency in seconds. cores: of each worker's own machine;
    None: all workers share the cores of the calibrated machine. memory: bytes of a machine; None: as calibrated.
    """

    strategy: str
    model: str
    workers: int
    batch: int
    length: int = 64
    bucket_bytes: int = 4 * 2**20
    rate: str | None = None
    latency: float = 0.0
    cores: int | None = None
    memory: float | None = None

    @property
    def grid(self) -> Grid:
        """The workers on each axis, by how the strategy cuts the model."""
        return {
            "": Grid(data=self.workers),
            "grid": Grid(data=max(1, self.workers // 2), tensor=min(2, self.workers)),
            "pipeline": Grid(pipeline=self.workers),
            "tensor": Grid(tensor=self.workers),
        }[STRATEGIES[self.strategy].cuts]
