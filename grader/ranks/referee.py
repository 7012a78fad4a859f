"""A run's referee: replies to requests of ranks, in the grader's process, where no student's code runs."""

from collections.abc import Sequence
from typing import Any, Protocol

Replies = list[tuple[int, Any]]  # the number of a request, and the reply to it


class Referee(Protocol):
    """Replies to a rank's requests in a run; it is in the run's Result. It must not believe what a message says."""

    def started(self, pids: Sequence[int]) -> None:
        """Take the ranks' process ids, before any of them can send a request."""

    def ask(self, message: dict) -> Replies:
        """Take a request, and return the replies that can be given now. Raises MessageError for what no rank sends."""
