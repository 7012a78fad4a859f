"""What is predicted: one strategy, one model, so many workers with so many examples each."""

from dataclasses import dataclass

from benchmark.strategies import STRATEGIES


@dataclass(frozen=True)
class Cell:
    """batch: examples of one worker. bucket_bytes: of own_overlap; the others have their own sizes.

    axes: of own_grid, the number of workers on the axes pipeline, data and tensor.
    """

    strategy: str
    model: str
    workers: int
    batch: int
    length: int = 64
    bucket_bytes: int = 4 * 2**20
    axes: tuple[int, int, int] | None = None

    @property
    def grid(self) -> tuple[int, int, int] | None:
        """The axes pipeline, data, tensor of a strategy that cuts the model; None for the others."""
        return {
            "grid": self.axes or (1, max(1, self.workers // 2), min(2, self.workers)),
            "pipeline": (self.workers, 1, 1),
            "tensor": (1, 1, self.workers),
        }.get(STRATEGIES[self.strategy].cuts)

    @property
    def stages(self) -> int:
        return self.grid[0] if self.grid else 1

    @property
    def replicas(self) -> int:
        return self.grid[1] if self.grid else self.workers

    @property
    def tensor(self) -> int:
        return self.grid[2] if self.grid else 1
