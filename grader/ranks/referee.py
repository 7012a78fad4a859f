"""A run's referee: answers what a rank asks, in the grader's process, where no student's code runs."""

from collections.abc import Sequence
from typing import Any, Protocol

Answers = list[tuple[int, Any]]  # numbers of asks, and what they are answered


class Referee(Protocol):
    """Answers a rank's asks in a run; it is in the run's Result. It believes nothing about a message."""

    def started(self, pids: Sequence[int]) -> None:
        """Take the ranks' process ids, before any of them can ask."""

    def ask(self, message: dict) -> Answers:
        """Take an ask, and return the answers that can be given now. Raises MessageError for what no rank sends."""
