"""The grader's end: starts ranks, answers their collectives, and says how each of them ended."""

from grader.ranks.outcome import RankResult, Result, RunError
from grader.ranks.running import run, start, stop

__all__ = ["RankResult", "Result", "RunError", "run", "start", "stop"]
