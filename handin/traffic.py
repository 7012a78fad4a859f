"""The section on task 4: traffic observed and expected for each batch size, as task4_traffic/compare.py reads it."""

from typing import TYPE_CHECKING

from cluster.emulate import why_not
from common.errors import InputError
from handin.bert import losses_table
from handin.figures import ReportFigures
from handin.findings import Findings, check_comparable, iteration_time, table, text
from handin.records import Run, Runs

if TYPE_CHECKING:
    from task4_traffic.compare import TrafficRun

BATCHES = (64, 32, 16)  # of all workers together, what the course asks for
MAY_DIFFER = ("total batch", "dropout", "learning rate", "steps of the schedule", "machine", "model", "parameters")
ON_ONE_MACHINE = "python -m cluster.launch --workers 4 -- task4_traffic/run_glue.py {}"
ON_NODES = (
    "python -m cluster.emulate --nodes 4 --rate 1gbit -- python task4_traffic/run_glue.py {} "
    "--master_ip 10.10.1.1 --world_size 4 --local_rank {{rank}}"
)
PREDICTED = (
    "--max_steps 10 --do_train --per_gpu_train_batch_size 2 --learning_rate 1e-5 --link_rate 1gbit "
    "--model_name_or_path $(python -m cluster.demo.random_bert 8M) --output_dir runs/task4_predicted"
)
TOLERANCE = 0.05  # of observed over expected with framing


def traffic(runs: Runs, findings: Findings, figures: ReportFigures) -> str:
    """A row for each run of task 4, predictions, and both plots."""
    from task4_traffic import compare  # here: it imports the student's expected.py

    found = sorted(runs.of("task4"), key=lambda run: (-run.setting["total batch"], run.name))
    _missing(found, findings)
    measured = {run: of for run in found if (of := _read(run, findings))}
    rows = []
    for run, of in measured.items():
        first, steps = next(iter(measured)), of.steps_per_epoch
        what = f"traffic of {first.name} and {run.name}"
        if (
            check_comparable(findings, what, first.setting, run.setting, MAY_DIFFER)
            and of.whose != measured[first].whose
        ):
            findings.doubt(f"{what} was not counted in the same way: {measured[first].whose}, and {of.whose}")
        bytes_of = (of.tensor_bytes / steps, of.expected.sent, of.expected.sent + of.framing.sent, of.observed.sent)
        sizes = [f"{size * steps / 1e6:.2f}" for size in bytes_of]
        rows.append([
            of.batch, of.dtype, of.whose, of.tensors, *sizes, *(f"{value:.3f}" for value in compare.ratios(of)),
            text(iteration_time(run), 4), f"`{run.name}`",
        ])  # fmt: skip
    head = "batch | dtype | counted | tensors | S | expected | with framing | observed | / expected | / with framing"
    of_runs = list(measured.values())
    return "".join([
        table(f"{head} | s per iteration | run", rows),
        f"{compare.extrapolations(of_runs)}\n\n{compare.predictions(of_runs)}\n\n",
        figures.copied(runs.folder / "traffic_per_epoch.png", "Bytes sent in an epoch against the batch size"),
        figures.copied(runs.folder / "traffic_over_time.png", "Traffic over time"),
        losses_table({f"batch {of.batch}, {of.dtype}": run for run, of in measured.items()}),
    ])  # fmt: skip


def _read(run: Run, findings: Findings) -> "TrafficRun | None":
    """Return task 4's own view of a run; None, and a doubt, where there is none. It calls the student's expected.py."""
    from task4_traffic import compare

    try:
        of = compare.read_run(run.folder)
        against = compare.ratios(of)[1]
    except InputError as error:
        findings.doubt(f"{run.name}: {str(error).removeprefix(f'{run.folder}: ')}")
        return None
    except Exception as error:  # whatever their code raises
        findings.doubt(f"{run.name}: the expected traffic cannot be computed ({error!r}); see region 4.2")
        return None
    if abs(against - 1) > TOLERANCE:
        cause = "something else used the interface, another interface was counted, or the expectation is wrong"
        findings.doubt(f"{run.name}: the observed traffic is {against:.2f} times the expected with framing: {cause}")
    return of


def _missing(found: list[Run], findings: Findings) -> None:
    """Name the batch sizes without a run, the run with shorter gradients, and the prediction."""
    there = {(run.setting["total batch"], run.config["grad_dtype"]) for run in found}
    wanted = {f"{size}": f"--per_gpu_train_batch_size {size // 4}" for size in BATCHES if (size, "fp32") not in there}
    if not any(dtype == "bf16" for _, dtype in there):
        wanted["bf16"] = "--per_gpu_train_batch_size 16 --grad_dtype bf16"
    # On emulated nodes if the other runs were there: the bytes of all must be counted in the same way.
    command = ON_NODES if (found[0].setting["machine"] == "node0" if found else not why_not()) else ON_ONE_MACHINE
    for name, flags in wanted.items():
        flags = f"--num_train_epochs 1 {flags} --output_dir runs/task4_{name}"
        findings.miss(f"task 4 with {name}", command.format(flags))
    if not any(run.config["link_rate"] for run in found):
        findings.miss("task 4 with a prediction for a larger model", ON_NODES.format(PREDICTED))
