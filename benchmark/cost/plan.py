"""What the workers of a calibration measure."""

from dataclasses import dataclass, field

from benchmark.cost.calibration import LOOPBACK


@dataclass(frozen=True)
class Plan:
    """What to measure among the workers of one launch; seconds are spent on each of transfers, compute and engines.

    workers: of each measurement, at most as many as were launched. sizes: bytes of transfers, none: no transfers.
    models and batches: of profiles, none: no profiles. strategies: whole steps of the first model and batch.
    """

    link: str = LOOPBACK
    workers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)
    seconds: float = 8.0
