"""The section on task 4: traffic observed and expected for each batch size, as task4_traffic/compare.py reads it."""

from typing import Any

from cluster.emulate import why_not
from common.errors import InputError
from handin.bert import losses_table
from handin.figures import Figures
from handin.findings import Findings, check_comparable, iteration_time, table
from handin.records import Run, Runs

BATCHES = (64, 32, 16)  # of all workers together, what the course asks for
MAY_DIFFER = ("total batch", "dropout", "learning rate", "steps of the schedule", "machine", "model", "parameters")
TOLERANCE = 0.05  # of observed over expected with framing
EXPLAINED = (
    "Megabytes sent in an epoch by {}: on emulated nodes, an interface counts one worker; on one machine, `lo` counts "
    "all workers together. S: bytes of all tensors of one iteration. Expected: payload by the algorithm. Framing was "
    "calibrated separately.{}\n\n"
)


def traffic(runs: Runs, findings: Findings, figures: Figures) -> str:
    """A row for each run of task 4, its two plots, and predictions."""
    found = sorted(runs.of("task4"), key=lambda run: (-run.setting["total batch"], run.name))
    _missing(found, findings)
    measured = {run: of for run in found if (of := _read(run, findings))}
    if not measured:
        return "Not measured: see `task4_traffic/README.md`.\n\n"
    first = next(iter(measured))
    rows, predicted, short = [], [], []
    for run, of in measured.items():
        findings.use(run, "traffic")
        what = f"traffic of {first.name} and {run.name}"
        check_comparable(findings, what, first.setting, run.setting, MAY_DIFFER)
        name, time, steps = f"`{run.name}`", iteration_time(run), of.steps_per_epoch
        expected, framing, observed = (part.sent * steps / 1e6 for part in (of.expected, of.framing, of.observed))
        cells = [f"{size:.2f}" for size in (of.tensor_bytes / 1e6, expected, expected + framing, observed)]
        cells += [f"{observed / expected:.3f}", f"{observed / (expected + framing):.3f}"]
        rows.append([of.batch, of.dtype, of.tensors, *cells, time.text(4) if time else "–", name])
        if of.predicted is not None and of.communication is not None:
            predicted.append([run.setting["model"], of.batch, f"{of.communication:.4f}", f"{of.predicted:.4f}", name])
        if of.counted < steps:
            short.append(f"{of.counted} of {steps} in {name}")
    ways = list(dict.fromkeys(of.whose for of in measured.values()))
    if len(ways) > 1:
        findings.doubt(f"the bytes of task 4 were not all counted in the same way: {', '.join(ways)}")
    computed = f" Computed from fewer iterations than an epoch has: {', '.join(short)}." if short else ""
    head = "batch | dtype | tensors | S | expected | with framing | observed | / expected | / with framing"
    parts = [
        EXPLAINED.format(" or ".join(ways), computed),
        table(f"{head} | s per iteration | run", rows),
        figures.copied(runs.folder / "traffic_per_epoch.png", "Bytes sent in an epoch against the batch size"),
        figures.copied(runs.folder / "traffic_over_time.png", "Traffic over time"),
        losses_table({f"batch {of.batch}, {of.dtype}": run for run, of in measured.items()}),
    ]
    if predicted:
        parts.append("Seconds of communication in an iteration, predicted from the payload and `--link_rate`:\n\n")
        parts.append(table("model | batch | measured | predicted | run", predicted))
    return "".join(parts)


def _read(run: Run, findings: Findings) -> Any:
    """Return task 4's own view of a run; None, and a doubt, where there is none. It calls the student's expected.py."""
    try:
        from task4_traffic.compare import ratios, read_run

        of = read_run(run.folder)
        against = ratios(of)[1]
    except InputError as error:
        findings.doubt(f"{run.name}: {str(error).removeprefix(f'{run.folder}: ')}")
        return None
    except Exception as error:  # whatever their code raises
        findings.doubt(f"{run.name}: the expected traffic cannot be computed ({error!r}); see region 4.2")
        return None
    if abs(against - 1) > TOLERANCE:
        findings.doubt(
            f"{run.name}: the observed traffic is {against:.2f} times the expected traffic with framing: something "
            "else used the interface, another interface was counted, or the expectation is wrong"
        )
    return of


def _missing(found: list[Run], findings: Findings) -> None:
    """Name the batch sizes without a run, the run with shorter gradients, and the prediction."""
    there = {(run.setting["total batch"], run.flag("grad_dtype")) for run in found}
    wanted = {f"{size}": f"--per_gpu_train_batch_size {size // 4}" for size in BATCHES if (size, "fp32") not in there}
    if not any(dtype == "bf16" for _, dtype in there):
        wanted["bf16"] = "--per_gpu_train_batch_size 16 --grad_dtype bf16"
    # On emulated nodes if the other runs were there: the bytes of all must be counted in the same way.
    nodes = found[0].setting["machine"] == "node0" if found else not why_not()
    for name, flags in wanted.items():
        findings.miss(f"task 4 with {name}", _command(nodes, f"--num_train_epochs 1 {flags}", f"task4_{name}"))
    if not any(run.flag("link_rate") for run in found):
        larger = "--learning_rate 1e-5 --model_name_or_path $(python -m cluster.random_bert 8M) --link_rate 1gbit"
        flags = f"--max_steps 10 --do_train --per_gpu_train_batch_size 2 {larger}"
        findings.miss("task 4 with a prediction for a larger model", _command(True, flags, "task4_predicted"))


def _command(nodes: bool, flags: str, folder: str) -> str:
    """Return the command that runs task 4 on four emulated nodes, or on this machine."""
    script = f"task4_traffic/run_glue.py {flags} --output_dir runs/{folder}"
    if not nodes:
        return f"python -m cluster.launch --workers 4 -- {script}"
    place = "--master_ip 10.10.1.1 --world_size 4 --local_rank {rank}"
    return f"python -m cluster.emulate --nodes 4 --rate 1gbit -- python {script} {place}"
