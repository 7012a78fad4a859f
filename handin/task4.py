"""Task 4 in the report: traffic observed and expected for each batch size, as task4_traffic/compare.py reads it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import InputError
from handin.pictures import Pictures
from handin.runs import Run, differences
from handin.sections import Findings, table

NOT_MEASURED = (
    "Not measured: see `task4_traffic/README.md`, and `python task4_traffic/compare.py` with the folders of its runs.\n"
)
_HEAD = ["batch", "workers", "tensors", "S (MB)", "iterations", "expected (MB)", "with framing (MB)", "observed (MB)"]
_TOLERANCE = 0.05  # of observed over expected with framing


def traffic(tree: Path, runs: Sequence[Run], folder: Path, findings: Findings, pictures: Pictures) -> str:
    """A row for each run of task 4, and its two plots; what cannot be read is named."""
    runs = sorted(runs, key=lambda run: (-_batch(run), run.name))
    if not runs:
        return NOT_MEASURED
    rows = [row for run in runs if (row := _row(tree, run, findings))]
    for run in runs[1:]:
        if other := differences(runs[0], run, but=("total batch", "dropout", "learning rate", "machine")):
            findings.doubt([f"traffic of {runs[0].name} and {run.name} is not comparable: {'; '.join(other)}"])
        if run.workers != runs[0].workers:
            said = f"{runs[0].workers} workers against {run.workers}"
            findings.doubt([f"traffic of {runs[0].name} and {run.name} is not comparable: {said}"])
    if len({_batch(run) for run in runs}) < 2:
        findings.doubt(["task 4 was run with one batch size only, the course asks for 64, 32 and 16"])
    plots = [
        pictures.copied(folder / "traffic_per_epoch.png", "Bytes sent in an epoch against the batch size"),
        pictures.copied(folder / "traffic_over_time.png", "Traffic over time"),
    ]
    text = (
        "Sent by rank 0 in an epoch. S: bytes of all tensors of one iteration; expected: payload by the algorithm; "
        "framing was calibrated apart; x: observed over expected with framing.\n\n"
    )
    return "\n".join([text + table([*_HEAD, "x", "run"], rows) if rows else NOT_MEASURED, "".join(plots)])


def _batch(run: Run) -> int:
    return run.setting["total batch"]


def _row(tree: Path, run: Run, findings: Findings) -> list[str] | None:
    """The cells of one run. What is expected comes from the student's own lines, so anything may be raised."""
    try:
        from task4_traffic.compare import read_run

        kept: Any = read_run(tree / run.name)
        steps = kept.steps_per_epoch
        expected, framing, observed = (x.sent * steps / 1e6 for x in (kept.expected, kept.framing, kept.observed))
        ratio = observed / (expected + framing)
    except InputError as error:
        findings.doubt([str(error)])
        return None
    except Exception as error:
        findings.doubt([f"{run.name}: no traffic can be expected ({type(error).__name__}: {error}); see region 4.2"])
        return None
    if abs(ratio - 1) > _TOLERANCE:
        findings.doubt([
            f"{run.name}: {ratio:.2f} times as much traffic was observed as expected with framing: "
            "something else used the interface, another one was counted, or the expectation is wrong"
        ])  # fmt: skip
    cells = [kept.batch, kept.world_size, kept.tensors, f"{kept.tensor_bytes / 1e6:.3f}", steps]
    return [*map(str, cells), *(f"{x:.2f}" for x in (expected, expected + framing, observed)), f"{ratio:.3f}",
            f"`{run.name}`"]  # fmt: skip
