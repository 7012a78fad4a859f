"""What the workers of a calibration measure."""

from dataclasses import dataclass, field
from typing import Any

from benchmark.cost.calibration import LOOPBACK


@dataclass(frozen=True)
class Turn:
    """Engines that are resident in the same workers and take turns, in random order.

    engines: label and batch size of each. A label is a strategy, or one with a second word: "ddp again".
    """

    model: str
    engines: list[tuple[str, int]]


@dataclass(frozen=True)
class CalibrationPlan:
    """What to measure among the workers of one launch; seconds are spent on each of transfers, compute and engines.

    workers: of each measurement, at most as many as were launched. sizes: bytes of transfers, none: no transfers.
    models and batches: of profiles, none: no profiles. turns: engines whose whole steps are timed together.
    """

    link: str = LOOPBACK
    workers: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    seconds: float = 8.0


def read_plan(content: dict[str, Any]) -> CalibrationPlan:
    """Return the plan that a worker was given as JSON."""
    return CalibrationPlan(**content | {"turns": [Turn(**turn) for turn in content["turns"]]})
