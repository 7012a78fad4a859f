"""What the workers of a calibration measure."""

from dataclasses import dataclass, field

from benchmark.cost.calibration import LOOPBACK

Turn = tuple[str, list[tuple[str, int]]]  # a model, and of each engine its label and batch size


@dataclass(frozen=True)
class CalibrationPlan:
    """What to measure among the workers of one launch; seconds are spent on each of transfers, compute and engines.

    workers: of each measurement, at most as many as were launched. sizes: bytes of transfers, none: no transfers.
    models and batches: of profiles, none: no profiles. turns: engines that are resident in the same workers, and take
    turns in random order. A label is a strategy, or one with a second word: "ddp again".
    """

    link: str = LOOPBACK
    workers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 8.0
