"""Task 4 in the report: traffic observed and expected for each batch size, as task4_traffic/compare.py reads it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.emulate import why_not
from common.errors import InputError
from handin.measures import iteration_time
from handin.report_pictures import Pictures
from handin.runs import Run, differences
from handin.sections import Findings, table

NOT_MEASURED = (
    "Not measured: see `task4_traffic/README.md`, and `python task4_traffic/compare.py` with the folders of its runs.\n"
)
_RUNS = (
    "model | batch | dtype | workers | tensors | S (MB) | iterations | s per iteration | of which communication | "
    "predicted | run"
)
_BYTES = (
    "model | batch | dtype | counted | expected (MB) | with framing (MB) | observed (MB) | x payload | "
    "x with framing | run"
)
# A model for which the bandwidth decides: a prediction from the bytes means something.
_PREDICTED = (
    "--do_train --learning_rate 1e-5 --per_gpu_train_batch_size 2 --link_rate 1gbit "
    "--model_name_or_path $(python -m cluster.random_bert 8M)"
)
_BATCHES = (64, 32, 16)  # of all workers together, what the course asks for
_MAY_DIFFER = ("total batch", "dropout", "learning rate", "machine", "steps of the schedule")
_TOLERANCE = 0.05  # of observed over expected with framing


def traffic(tree: Path, runs: Sequence[Run], folder: Path, findings: Findings, pictures: Pictures) -> str:
    """A row for each run of task 4, and its two plots; what cannot be read is named."""
    runs = sorted(runs, key=lambda run: (-_batch(run), run.name))
    findings.missing += _missing(runs)
    if not runs:
        return NOT_MEASURED
    rows = [row for run in runs if (row := _row(tree, run, findings))]
    for run in runs[1:]:
        first = next(
            first for first in runs if first.setting["model"] == run.setting["model"]
        )  # the larger one predicts
        if other := differences(first, run, but=_MAY_DIFFER):
            findings.doubt([f"traffic of {first.name} and {run.name} is not comparable: {'; '.join(other)}"])
        if run.workers != first.workers:
            difference = f"{first.workers} workers vs. {run.workers}"
            findings.doubt([f"traffic of {first.name} and {run.name} is not comparable: {difference}"])
    ways = {cells[1][3]: cells[1][-1] for cells in rows}
    if len(ways) > 1:
        different_ways = "; ".join(f"{run} counts {whose}" for whose, run in ways.items())
        findings.doubt([f"the bytes of task 4 were not all counted in the same way: {different_ways}"])
    plots = [
        pictures.copied(folder / "traffic_per_epoch.png", "Bytes sent in an epoch against the batch size"),
        pictures.copied(folder / "traffic_over_time.png", "Traffic over time"),
    ]
    text = (
        "Bytes sent in an epoch, by the workers in the column `counted`: on emulated nodes, an interface counts one "
        "worker; on one machine, `lo` counts all workers together, so their sum is expected. S: bytes of all tensors "
        "of one iteration; expected: payload by the algorithm; framing was calibrated separately; x: observed over "
        "expected, for the payload alone and with framing. Predicted: seconds of communication in an iteration, from "
        f"the payload and `--link_rate`. Iterations: of an epoch.{_extrapolated(runs)}\n\n"
    )
    if not rows:
        return "\n".join([NOT_MEASURED, "".join(plots)])
    of_runs, of_bytes = zip(*rows, strict=True)
    return "\n".join([text + table(_RUNS, of_runs), table(_BYTES, of_bytes), "".join(plots)])


def _extrapolated(runs: Sequence[Run]) -> str:
    """Return which runs did not train a whole epoch, so that their bytes of an epoch are computed; "" if all did."""
    short = [run for run in runs if not run.whole_epochs]
    if not short:
        return ""
    lengths = ", ".join(
        f"{len(run.first['iterations'])} of {run.first['steps_per_epoch']} in `{run.name}`" for run in short
    )
    return f" Extrapolated to an epoch from fewer iterations: {lengths}."


def _missing(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The batch sizes of which there is no run, the run with shorter gradients, and the prediction."""
    nodes = _on_nodes(runs[0]) if runs else not why_not()
    there = {_batch(run) for run in runs if _dtype(run) == "fp32"}
    missing = []
    if absent := [batch for batch in _BATCHES if batch not in there]:
        of_a_worker = " ".join(str(batch // 4) for batch in absent)
        folder = "--per_gpu_train_batch_size $b --output_dir runs/task4_$((4 * b))"
        what = f"task 4 with total batch {', '.join(map(str, absent))}"
        missing.append((what, f"for b in {of_a_worker}; do {_script(4, nodes, folder)}; done"))
    if not any(_dtype(run) == "bf16" for run in runs):
        flags = "--per_gpu_train_batch_size 16 --grad_dtype bf16 --output_dir runs/task4_bf16"
        missing.append(("task 4 with --grad_dtype bf16", _script(4, nodes, flags)))
    if not any(run.first["config"].get("link_rate") for run in runs):
        flags = f"{_PREDICTED} --output_dir runs/task4_predicted"
        missing.append(("task 4 with a prediction for a larger model", _script(4, True, flags, "--max_steps 10")))
    return missing


def _again(run: Run) -> str:
    """Return how to run it again, to be put behind these words; a run that was moved aside can only be deleted."""
    if run.name.endswith(".kept"):
        return ", or delete this folder"
    flags = f"--per_gpu_train_batch_size {run.first['config']['per_gpu_train_batch_size']}"
    if _dtype(run) != "fp32":
        flags += f" --grad_dtype {_dtype(run)}"
    flags += f" --output_dir {run.name} --overwrite_output_dir"
    return f": `{_script(run.workers, _on_nodes(run), flags)}`"


def _on_nodes(run: Run) -> bool:
    """Return whether the run was on emulated nodes: then its other rows must be measured there, too."""
    return run.workers > 1 and run.first["host"]["name"] == "node0"


def _script(workers: int, nodes: bool, flags: str, length: str = "--num_train_epochs 1") -> str:
    """Return the command that runs task 4 on emulated nodes, or on this machine."""
    script = f"task4_traffic/run_glue.py {length} {flags}"
    if not nodes:
        return f"python -m cluster.launch --workers {workers} -- {script}"
    place = f"--master_ip 10.10.1.1 --world_size {workers} --local_rank {{rank}}"
    return f"python -m cluster.emulate --nodes {workers} --rate 1gbit -- python {script} {place}"


def _dtype(run: Run) -> str:
    return str(run.first["config"].get("grad_dtype", "fp32"))


def _batch(run: Run) -> int:
    return run.setting["total batch"]


def _row(tree: Path, run: Run, findings: Findings) -> tuple[list[str], list[str]] | None:
    """The cells of one run in both tables. The student's own lines say what is expected: anything may be raised."""
    try:
        from task4_traffic.compare import read_run

        traffic_run: Any = read_run(tree / run.name)
        steps = traffic_run.steps_per_epoch
        expected, framing, observed = (
            x.sent * steps / 1e6 for x in (traffic_run.expected, traffic_run.framing, traffic_run.observed)
        )
        ratio = observed / (expected + framing)
    except InputError as error:
        message = str(error).replace(str(tree / run.name), run.name)
        findings.doubt([message + (_again(run) if message.endswith("run it again") else "")])
        return None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        findings.doubt([f"{run.name}: the expected traffic cannot be computed ({reason}); see region 4.2"])
        return None
    if abs(ratio - 1) > _TOLERANCE:
        findings.doubt([
            f"{run.name}: the observed traffic is {ratio:.2f} times the expected traffic (with framing): "
            "something else used the interface, another interface was counted, or the expectation is wrong"
        ])  # fmt: skip
    prediction = ["–", "–"]
    if run.first["config"].get("link_rate"):
        prediction = [f"{traffic_run.communication or 0.0:.4f}", f"{traffic_run.predicted:.4f}"]
    findings.use(run, "traffic")
    begin, name = [str(run.setting["model"]), str(traffic_run.batch), _dtype(run)], f"`{run.name}`"
    size, seconds = f"{traffic_run.tensor_bytes / 1e6:.3f}", str(iteration_time(run) or "–")
    megabytes = [f"{x:.2f}" for x in (expected, expected + framing, observed)]
    return (
        [*begin, str(traffic_run.world_size), str(traffic_run.tensors), size, str(steps), seconds, *prediction, name],
        [*begin, traffic_run.whose, *megabytes, f"{observed / expected:.3f}", f"{ratio:.3f}", name],
    )
