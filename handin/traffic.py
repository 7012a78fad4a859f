"""Task 4 in the report: the tables and plots that task4_traffic/compare.py has left in runs/task4_traffic."""

from pathlib import Path

from handin.sections import Findings


def traffic(tree: Path, runs: Path, findings: Findings) -> str:
    return "No measurement (this task is optional).\n"
