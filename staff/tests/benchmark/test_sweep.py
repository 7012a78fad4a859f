"""benchmark.sweep and benchmark.tables: what is run and kept, and the tables and doubts of real records."""

import csv
import json
import math
import shutil
import statistics
import sys
from pathlib import Path

import pytest

from benchmark import sweep
from benchmark.measure.record import FailedRun, SweepCell, SweepLaunch
from benchmark.strategies import Label
from benchmark.sweep import keep, parse, plan
from benchmark.tables import write_tables
from common.errors import InputError
from common.paths import ROOT
from staff.tests.cluster.started_processes import run
from staff.tests.workers import group

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts workers with gloo")
TOO_LONG = 900  # seconds; a busy machine
SINGLE, DDP = Label("single"), Label("ddp")
STEPS, LENGTH = 9, 16
# Where a run was kept: in folders of any depth; strategy, workers, examples of one worker.
KEPT = {"single": (SINGLE, 1, 4), "deeper/ddp1": (DDP, 1, 4), "deeper/still/ddp2": (DDP, 2, 2)}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Real runs that divide 4 examples in a step among 1 and 2 workers."""
    folder = tmp_path_factory.mktemp("kept")
    for name, (label, workers, batch) in KEPT.items():
        words = ["--strategy", label.strategy, "--batch_size", batch, "--length", LENGTH, "--max_steps", STEPS]
        words += ["--eval_batches", 4 * workers, "--output_dir", folder / name]
        codes = group(ROOT / "benchmark" / "run.py", workers, tmp_path_factory.mktemp("log"), *words)
        assert codes == [0] * workers
    return folder


@pytest.fixture
def folder(kept, tmp_path):
    return Path(shutil.copytree(kept, tmp_path / "runs"))


def record(folder: Path, name: str, **changes: object) -> dict:
    """A record; `changes` are written into its file: the same figures with other values."""
    file = folder / name / "result.json"
    values = json.loads(file.read_text())
    assert set(changes) <= set(values)
    if changes:
        file.write_text(json.dumps(values | changes))
    return values


def rows_of(result: dict) -> dict:
    return {(row["strategy"], row["workers"]): row for row in result["rows"]}


# --- tables ---


@pytest.mark.medium
def test_a_row_has_a_run_s_figures_and_its_speed_over_those_of_one_worker(folder):
    single, ddp1, ddp2 = (record(folder, name) for name in KEPT)
    speeds = [4 * len(run["steps_ms"]) / sum(run["steps_ms"]) * 1e3 for run in (single, ddp1, ddp2)]

    result = write_tables(folder)

    row = rows_of(result)["ddp", 2]
    assert (row["model"], row["batch_size"]) == ("gpt2-tiny", 2)
    assert row["examples_per_second"] == pytest.approx(speeds[2])
    assert row["speedup"] == pytest.approx(speeds[2] / speeds[1])
    assert row["over_single"] == pytest.approx(speeds[2] / speeds[0])
    assert row["weak_speedup"] is None  # no worker alone has 2 examples
    assert row["step_ms"] == pytest.approx(statistics.median(ddp2["steps_ms"]))
    assert row["communication_s"] == pytest.approx(ddp2["communication"]["total_ms"] * len(ddp2["steps_ms"]) / 1e3)
    assert row["sent_mb"] == pytest.approx(4 * ddp2["parameters"] / 1e6)  # a ring of two sends all gradients once
    assert row["ideal_mb"] == pytest.approx(16 * ddp2["parameters"] / 1e6) == pytest.approx(row["kept_mb"], rel=0.05)
    assert row["peak_mb"] == max(worker["memory"]["peak"] for worker in ddp2["workers"]) / 1e6 > row["kept_mb"]
    assert row["perplexity"] == pytest.approx(math.exp(row["validation_loss"]))
    assert ddp2["tokens_per_second"] == pytest.approx(LENGTH * speeds[2])
    assert [rows_of(result)[place]["gradient"] for place in (("single", 1), ("ddp", 2))] == ["ok", "not proved"]
    with (folder / "scaling.csv").open() as file:
        assert [float(line["over_single"]) for line in csv.DictReader(file) if line["workers"] == "2"] == [
            row["over_single"]
        ]
    _, _, head, _, one, two, *_ = (folder / "scaling.md").read_text().splitlines()
    assert head.split(" | ")[1:] == ["ddp", "single |"]
    assert (one.split(" | ")[1:], two.split(" | ")[1]) == (
        [f"{speeds[1] / speeds[0]:.4g}", "1 |"], f"{speeds[2] / speeds[0]:.4g}"
    )  # fmt: skip
    for figure in ("throughput", "scaling", "total_time", "communication_time", "memory"):
        assert (folder / f"{figure}_gpt2-tiny.png").stat().st_size > 5000
        assert (folder / f"{figure}_gpt2-tiny.pdf").read_bytes().startswith(b"%PDF")
    assert not (folder / "scaling.tex").exists()
    write_tables(folder, with_latex=True)
    _, _, caption, _, _, heads, _, one, *_ = (folder / "scaling.tex").read_text().splitlines()
    assert "gpt2-tiny, 4 examples in a step, 16 tokens, fp32" in caption and "cores" in caption
    assert (heads, one) == (r"workers & ddp & single \\", rf"1 & {speeds[1] / speeds[0]:.4g} & 1 \\")


@pytest.mark.medium
def test_training_is_the_same_on_one_and_two_workers(folder):
    rows = rows_of(write_tables(folder))

    losses = [record(folder, name)["losses"] for name in KEPT]
    assert len(losses[0]) == STEPS and losses[1:] == [pytest.approx(losses[0], abs=1e-5)] * 2
    assert len({round(row["validation_loss"], 4) for row in rows.values()}) == 1


@pytest.mark.medium
def test_latency_and_memory_have_the_layout_of_the_profiling_project(folder):
    def launch(name: str, label: Label, batch: int) -> Path:
        keep(folder / name / "cell.json", SweepLaunch(SweepCell(label, "t5-tiny", batch, 2), "ok", {}))
        return folder / name

    shutil.copytree(folder / "deeper/still/ddp2", folder / "x")
    launch("x", Label("zero2"), 1)
    keep(launch("y", Label("zero2"), 4) / "failure.json", FailedRun("OOM", "out of memory"))
    keep(launch("z", Label("zero2_offload"), 1) / "failure.json", FailedRun("error", "no operator"))

    result = write_tables(folder)

    ddp2 = record(folder, "deeper/still/ddp2")
    latency = f"{statistics.median(ddp2['steps_ms']):.2f}"
    assert len(ddp2["steps_ms"]) < 6  # so no median has an interval
    blocks = (folder / "latency.csv").read_text().splitlines()
    assert blocks == [
        "ddp,1,2,4", f"gpt2-tiny,,{latency},",
        "optimization_level2,1,2,4", f"t5-tiny,{latency},,OOM",
        "optimization_level2_offload,1,2,4", "t5-tiny,error,,",
    ]  # fmt: skip
    assert (folder / "latency_2.csv").read_text() == (folder / "latency.csv").read_text()
    one = f"{statistics.median(record(folder, 'single')['steps_ms']):.2f}"
    assert (folder / "latency_1.csv").read_text().endswith(f"single,4\ngpt2-tiny,{one}\n")
    peak = f"{max(worker['memory']['peak'] for worker in ddp2['workers']) / 1e6:.2f}"
    assert (folder / "mem.csv").read_text().splitlines()[3] == f"t5-tiny,{peak},,OOM"
    assert [run["outcome"] for run in result["failures"]] == ["OOM", "error"]


@pytest.mark.medium
def test_of_several_launches_the_row_has_the_median_and_the_interval_of_the_mean(folder):
    steps = record(folder, "single")["steps_ms"]
    workers = record(folder, "single")["workers"]
    for repeat, factor in enumerate((1, 2, 4)):
        shutil.copytree(folder / "single", folder / f"r{repeat}")
        keep(folder / f"r{repeat}/cell.json", SweepLaunch(SweepCell(SINGLE, "gpt2", 4, 1, repeat), "ok", {}))
        needed = [one | {"memory": one["memory"] | {"peak": 1e6 * factor}} for one in workers]
        record(folder, f"r{repeat}", steps_ms=[factor * step for step in steps], workers=needed)

    (row,) = (row for row in write_tables(folder)["rows"] if row["model"] == "gpt2")

    speed = 4 * len(steps) / sum(steps) * 1e3
    assert row["examples_per_second"] == pytest.approx(speed / 2)
    low, high = row["examples_per_second_low"], row["examples_per_second_high"]
    assert (low + high) / 2 == pytest.approx(speed * (1 + 1 / 2 + 1 / 4) / 3) and low < high
    # Of 1, 2 and 4, the mean is 7 / 3, its error 0.8819, and Student's t of 2 degrees of freedom 4.303.
    assert (row["peak_mb"], row["peak_mb_low"], row["peak_mb_high"]) == pytest.approx((2, -1.461, 6.128), abs=0.01)
    for name, head in (("latency", "single,4,4_low,4_high"), ("mem", "single,4,4_low,4_high")):
        lines = list(csv.reader((folder / f"{name}_1.csv").read_text().splitlines()))
        assert ",".join(lines[-3]) == head or ",".join(lines[-2]) == head
        of_gpt2 = next(line for line in lines if line[0] == "gpt2")
        column = {"latency": "step_ms", "mem": "peak_mb"}[name]
        assert of_gpt2[1:] == [f"{row[column + end]:.2f}" for end in ("", "_low", "_high")]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: {"losses": [loss + 1e-3 for loss in run["losses"]]}, "another training"),
        (lambda run: {"losses": [*run["losses"][:-1], math.nan]}, "another training"),
        (lambda run: {"losses": run["losses"][:1] * STEPS}, "the loss never changes"),
        (lambda run: {"environment": run["environment"] | {"load": 99.0}}, "the machine was busy"),
        (lambda run: {"steps_ms": [step / 1000 for step in run["steps_ms"]]}, "exceeds the number of workers"),
        (lambda run: {}, ""),
    ],
)
def test_what_cannot_be_true_or_believed_is_flagged(folder, change, says):
    for name in KEPT:
        record(folder, name, environment=record(folder, name)["environment"] | {"load": 0.1})
    record(folder, "deeper/still/ddp2", **change(record(folder, "deeper/still/ddp2")))
    if not says:  # a speed-up above 2 can also be that of this machine
        record(folder, "deeper/still/ddp2", steps_ms=record(folder, "deeper/ddp1")["steps_ms"])

    result = write_tables(folder)

    assert says in "".join(result["flagged"]) if says else not result["flagged"]
    with (folder / "scaling.csv").open() as file:
        in_file = [row.get("flagged") or "" for row in csv.DictReader(file)]
    assert any(says in text for text in in_file) if says else not any(in_file)


# --- sweep ---


@pytest.mark.parametrize(
    ("words", "cells"),
    [
        (  # the same batch on each worker
            "--strategies single,ddp --batch_sizes 1,2 --workers 1,2",
            [("single", 1, 1), ("single", 2, 1), ("ddp", 1, 1), ("ddp", 2, 1), ("ddp", 1, 2), ("ddp", 2, 2)],
        ),
        (  # divided
            "--only single,ddp --examples_per_step 8 --workers 1,2,4",
            [("single", 8, 1), ("ddp", 8, 1), ("ddp", 4, 2), ("ddp", 2, 4)],
        ),
    ],
)
def test_a_sweep_is_the_list_of_all_combinations_that_can_run(words, cells):
    planned = plan(parse(words.split())[0])

    assert [(cell.label.strategy, cell.batch_size, cell.workers) for cell in planned] == cells
    assert len({cell.name for cell in planned}) == len(cells)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--workers 1,3 --examples_per_step 16", ["--examples_per_step", "3", "16", "15"]),
        ("--strategies zero7", ["--strategies", "zero7"]),
        ("--workers 0", ["--workers", "0"]),
        ("--strategies single --workers 2", ["--workers", "single", "2"]),
        ("--models bert", ["--models", "bert"]),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_flag_and_its_value(words, named):
    with pytest.raises(InputError) as refused:
        plan(parse(words.split())[0])

    assert all(word in str(refused.value) for word in named), refused.value


@pytest.mark.medium
def test_a_sweep_records_what_fails_goes_on_and_keeps_what_is_done(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("def build():\n    return 1\n")
    flags = ["--models", f"gpt2-tiny,{tmp_path}/mine.py:build", "--strategies", "single", "--batch_sizes", "4"]
    flags += ["--workers", "1", "--steps", "3", "--output_dir", str(tmp_path / "s")]

    def swept(*more: str) -> dict:
        monkeypatch.setattr(sys, "argv", ["sweep", *flags, *more])
        sweep.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    result = swept()
    (failure,) = result["failures"]
    assert failure["outcome"] == "error" and "returned int" in failure["message"]
    assert (tmp_path / "s/latency.csv").read_text().splitlines()[2] == "mine.py:build,error"
    assert [(row["model"], row["strategy"]) for row in result["rows"]] == [("gpt2-tiny", "single")]

    written = {file: file.stat().st_mtime_ns for file in tmp_path.glob("s/*/*.json")}
    assert swept() == result
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("s/*/*.json")} == written  # nothing was started
    with pytest.raises(InputError, match="delete the folder"):
        swept("--", "--length", "32")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pytest.raises(InputError, match="threads"):
        swept()


@pytest.mark.proof
def test_a_sweep_over_several_numbers_of_workers_divides_proves_and_names_a_wrong_strategy(tmp_path):
    """A user's own model, whose file breaks own_ring: no gradient is averaged."""
    (tmp_path / "model.py").write_text(
        "from benchmark.engines import own\nfrom benchmark.example_model import build\n"
        "own.average_gradients = lambda model: None\n"
    )
    words = ["--models", f"{tmp_path}/model.py:build", "--only", "single,ddp,own_ring", "--workers", "1,2"]
    words += ["--examples_per_step", "4", "--steps", "6", "--repeats", "2", "--output_dir", tmp_path / "s"]

    done = run("-m", "benchmark.sweep", *words, timeout=TOO_LONG)

    result = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and "wrong: own_ring" in done.stderr.splitlines()[-1]
    gradients = {place: row["gradient"] for place, row in rows_of(result).items()}
    assert set(gradients) == {("single", 1), ("ddp", 1), ("ddp", 2), ("own_ring", 1)} | (
        {("single all cores", 1)} if ("single all cores", 1) in gradients else set()
    )
    assert set(gradients.values()) == {"ok"}
    assert {run["outcome"] for run in result["failures"]} == {"wrong"}
    losses = [row["train_loss"] for row in result["rows"]]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5)
    assert {row["launches"] for row in result["rows"]} == {2}


@pytest.mark.proof
def test_out_of_memory_is_recorded_as_such(tmp_path):
    flags = ["--strategies", "single", "--batch_sizes", "4", "--workers", "1", "--steps", "3"]

    done = run("-m", "benchmark.sweep", *flags, "--memory_limit_mb", "1", "--output_dir", tmp_path, timeout=TOO_LONG)

    assert json.loads(done.stdout.splitlines()[-1])["failures"][0]["outcome"] == "OOM"
    assert (tmp_path / "latency.csv").read_text() == "single,4\ngpt2-tiny,OOM\n"


def test_a_rank_that_fails_ends_its_job_on_slurm():
    files = sorted((ROOT / "benchmark" / "slurm").glob("*.sbatch"))

    assert [file.name for file in files if "\nsrun --kill-on-bad-exit=1 " not in file.read_text()] == []
