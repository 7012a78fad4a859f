"""Runs a script on several workers, as a student does: real processes, real gloo, and the course's own flags."""

import json
from pathlib import Path
from typing import Any

from cluster.launch import free_port
from common.workers.run_files import files_of_a_run
from staff.tests.warm import Script


def start(script: Path, world_size: int, folder: Path, *words: object) -> list[Script]:
    """Start all workers; rank r prints into folder/log{r}.txt. folder/run is their output folder, or as `words` say."""
    folder.mkdir(exist_ok=True)
    place = ["--master_ip", "127.0.0.1", "--master_port", free_port(), "--world_size", world_size]
    if "--output_dir" not in words:
        place += ["--output_dir", folder / "run"]
    words = (*words, *place, "--local_rank")
    return [Script(script, [*words, rank], folder / f"log{rank}.txt") for rank in range(world_size)]


def wait(workers: list[Script]) -> list[int]:
    """Wait for all, and return their exit codes."""
    try:
        return [worker.wait(timeout=900) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def group(script: Path, world_size: int, folder: Path, *words: object) -> list[int]:
    """Run all workers to their end; return the exit codes."""
    return wait(start(script, world_size, folder, *words))


def run(script: Path, world_size: int, folder: Path, *words: object) -> list[dict[str, Any]]:
    """Run all workers to a good end; return the record of each rank. The next run would remove all of its files."""
    codes = group(script, world_size, folder, *words)
    assert codes == [0] * world_size, "".join((folder / f"log{rank}.txt").read_text() for rank in range(world_size))
    assert set(files_of_a_run(folder / "run")) == set((folder / "run").iterdir())
    return [json.loads((folder / "run" / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def mean_losses(records: list[dict[str, Any]]) -> list[float]:
    """Return the loss of every iteration, as the mean over the workers."""
    columns = zip(*([step["loss"] for step in record["iterations"]] for record in records), strict=True)
    return [sum(column) / len(records) for column in columns]
