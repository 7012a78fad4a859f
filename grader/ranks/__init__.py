"""The grader's end: starts ranks, answers their collectives, and says how each of them ended."""

from grader.ranks.running import run, start, stop

__all__ = ["run", "start", "stop"]
