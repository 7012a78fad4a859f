"""The tables of sweeps and of all frameworks: literal figures, what is flagged, what is run and what is kept."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmark.frameworks import DEFAULTS
from benchmark.sweep import check_kept, command_of, flags_of, parse, plan, steps_for
from benchmark.tables import (
    SweepRun,
    combined,
    csv_rows,
    disagreements,
    markdown,
    row_of,
    write_frameworks,
    write_tables,
)
from benchmark.training.workload import Workload
from common.errors import InputError
from tests.own.started_processes import run as run_python


def result(speed: float, loss: float, **values) -> dict:
    return {
        "samples_per_second": speed,
        "wall_s": 4.0,
        "steps": {"dropped": 2, "timed": 20, "traced": 2},
        "communication": {"total_ms": 50.0, "exposed_ms": 10.0},
        "memory": {"persistent_counted": 3_000_000, "peak": 5_000_000},
        "evaluations": [{"step": 12, "loss": 9.0, "perplexity": 9.0}, {"step": 24, "loss": loss, "perplexity": 7.5}],
    } | values


SINGLE, ONE, TWO = (
    SweepRun("single", "gpt2-tiny", 8, 1),
    SweepRun("ddp", "gpt2-tiny", 8, 1),
    SweepRun("ddp", "gpt2-tiny", 4, 2),
)
RESULTS = {SINGLE: result(100.0, 2.0), ONE: result(80.0, 2.0), TWO: result(120.0, 2.0)}


def test_a_row_compares_with_one_worker_of_the_same_examples_and_adds_up_the_timed_steps():
    rows = [row_of(run, RESULTS) for run in RESULTS]

    assert csv_rows(rows)[0] == (
        "model framework workers batch_size speedup over_single examples_per_second total_s communication_s exposed_s "
        "kept_mb peak_mb validation_loss perplexity"
    ).split(" ")
    assert csv_rows(rows)[3] == (
        "gpt2-tiny ddp 2 4 1.5000 1.2000 120.0000 4.0000 1.0000 0.2000 3.0000 5.0000 2.0000 7.5000".split(" ")
    )
    assert markdown(rows).splitlines()[-1] == (
        "| gpt2-tiny | ddp | 2 | 4 | 1.5000 | 1.2000 | 120.0000 | 4.0000 | 1.0000 | 0.2000 "
        "| 3.0000 | 5.0000 | 2.0000 | 7.5000 |"
    )


def test_what_a_gpu_did_is_in_its_row():
    row = row_of(TWO, {TWO: result(120.0, 2.0, utilisation={"gpu_utilisation": 97.0, "gpu_power": 310.0})})

    assert csv_rows([row])[0][-2:] == ["gpu_utilisation", "gpu_power"]
    assert csv_rows([row])[1][-2:] == ["97.0000", "310.0000"]


def test_what_was_not_measured_is_empty_and_a_column_without_a_figure_is_left_out():
    alone = {TWO: result(120.0, 2.0, communication={"total_ms": None, "exposed_ms": None}, evaluations=[])}

    row = row_of(TWO, alone)

    figures = ["gpt2-tiny", "ddp", "2", "4", "120.0000", "4.0000", "3.0000", "5.0000"]
    assert csv_rows([row])[1] == figures
    beside = [row, row_of(TWO, {TWO: result(120.0, 2.0)})]
    assert csv_rows(beside)[1] == [*figures[:6], "", "", *figures[6:], "", ""]
    assert " | - | - | 3.0000 | 5.0000 | - | - |" in markdown(beside).splitlines()[-2]


def test_of_several_launches_the_row_has_the_median_and_the_mean_with_its_interval():
    failed = {"outcome": "error", "message": ""}
    launches = [result(100.0, 2.0), failed, result(140.0, 2.0), result(120.0, 2.0)]

    row = row_of(TWO, RESULTS | {TWO: combined(launches)})

    # Student's t of 2 degrees of freedom is 4.303, and the mean's error 20 / sqrt(3).
    mean, low, high = (row[f"launches_{name}"] for name in ("mean", "low", "high"))
    assert (row["examples_per_second"], mean) == (120.0, 120.0)
    assert (low, high) == (pytest.approx(70.32, abs=0.01), pytest.approx(169.68, abs=0.01))
    assert combined(launches[:3])["launches_95"] == (120.0, None, None)
    assert combined([failed, failed]) == failed


@pytest.mark.parametrize("loss", [2.01, 1.99, float("nan")])
def test_a_framework_that_trains_something_else_is_flagged(loss):
    results = RESULTS | {TWO: result(500.0, loss)}

    flagged = disagreements([row_of(run, results) for run in results])

    assert len(flagged) == 1
    assert "gpt2-tiny, ddp, 2 workers: validation loss" in flagged[0]
    assert "but 2.000000 with single on 1" in flagged[0]


def test_the_table_has_the_fastest_framework_of_each_number_of_workers_first(tmp_path):
    for run, (speed, loss) in {SINGLE: (70.0, 2.0), ONE: (80.0, 2.0), TWO: (120.0, 2.5)}.items():
        keep(tmp_path, run, **result(speed, loss, environment={"load": 9.0, "cores": 2}))
    versions = {"versions": {}, "cores": 2, "gpu": None, "load": 9.0, "commit": "c", "date": "today"}

    written = write_frameworks(tmp_path, [SINGLE, ONE, TWO], [], versions, {})

    assert [(row["framework"], row["workers"]) for row in written["rows"]] == [("ddp", 1), ("single", 1), ("ddp", 2)]
    assert len(written["flagged"]) == 1 and "with single on 1" in written["flagged"][0]
    assert len(written["busy"]) == 3
    assert (tmp_path / "frameworks.csv").read_text().startswith("# 2 cores, no GPU, load 9.0")


def keep(folder: Path, run: SweepRun, **values) -> None:
    """Leave a result as benchmark.run does: 100 examples per second and worker."""
    content = result(100.0 * run.workers, 2.0, step_ms=10.0 * run.batch_size, losses=[2.0, 1.0])
    (folder / run.name).mkdir(parents=True)
    load = {"environment": {"load": 1.0, "cores": 2}}
    (folder / run.name / "result.json").write_text(json.dumps(content | load | values))


def test_the_tables_have_the_layout_of_the_profiling_project(tmp_path):
    for batch in (1, 2):
        keep(tmp_path, SweepRun("zero2", "t5-tiny", batch, 2))
        keep(tmp_path, SweepRun("zero2_offload", "t5-tiny", batch, 2))
    failed = tmp_path / SweepRun("zero2", "t5-tiny", 4, 2).name
    failed.mkdir()
    (failed / "failure.json").write_text(json.dumps({"outcome": "OOM", "message": "out of memory"}))

    write_tables(tmp_path)

    assert (tmp_path / "latency.csv").read_text() == (
        "optimization_level2,1,2,4\nt5-tiny,10.00,20.00,OOM\noptimization_level2_offload,1,2,4\nt5-tiny,10.00,20.00,\n"
    )
    assert (tmp_path / "mem.csv").read_text().startswith("optimization_level2,1,2,4\nt5-tiny,5.00,5.00,OOM\n")
    assert (tmp_path / "throughput_t5-tiny.png").stat().st_size > 0
    assert not (tmp_path / "scaling.csv").exists()  # nothing ran on one worker


def test_figures_that_cannot_be_true_and_a_busy_machine_are_flagged(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr("benchmark.measure.ranking.draw_ranking", lambda path, bars, label, title: titles.append(title))
    keep(tmp_path, SweepRun("ddp", "gpt2", 4, 1))
    wrong = {"samples_per_second": 300.0, "losses": [1.0, 1.0], "environment": {"load": 13.0, "cores": 2}}
    keep(tmp_path, SweepRun("ddp", "gpt2", 4, 2), **wrong)

    flagged = write_tables(tmp_path)["flagged"]

    assert len(flagged) == 3
    assert "speed-up 3.00 exceeds the number of workers" in flagged[0]
    assert "the loss never changes" in flagged[1]
    assert "the machine was busy (load 13.0 on 2 cores)" in flagged[2]
    busy = "# the machine was busy: do not compare the times of gpt2-ddp-b4-w2\n"
    assert (tmp_path / "latency.csv").read_text().startswith(busy)
    assert set(titles) == {"gpt2, batch 4 x 2 workers, on a busy machine"}
    assert (tmp_path / "load.csv").read_text() == "run,load,cores\ngpt2-ddp-b4-w1,1.0,2\ngpt2-ddp-b4-w2,13.0,2\n"


@pytest.mark.parametrize(
    ("other", "steps", "message"),
    [
        ({"flags": "--precision bf16"}, 24, "holds a run of flags --precision bf16; delete the folder"),
        ({"versions": "torch 1.0"}, 24, "versions torch 1.0; delete the folder"),
        ({"commit": "0123456"}, 24, "commit 0123456; delete the folder"),
        ({"OMP_NUM_THREADS": "7"}, 24, "OMP_NUM_THREADS 7; delete the folder"),
        ({}, 26, "24 steps, expected 26; delete the folder"),
        (None, 24, "flags unknown, commit unknown, versions unknown"),
    ],
)
def test_what_is_kept_of_other_settings_is_refused(tmp_path, other, steps, message):
    run, more = SweepRun("ddp", "gpt2", 4, 2), ["--length", "64"]
    keep(tmp_path, run)
    if other is not None:
        (tmp_path / run.name / "command.json").write_text(json.dumps(command_of(more) | other))

    with pytest.raises(InputError, match=message):
        check_kept(run, tmp_path, steps, more)


def test_a_failure_is_kept_under_the_same_limit_only(tmp_path):
    run, limit = SweepRun("ddp", "gpt2", 4, 2), ["--memory_limit_mb", "40"]
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "failure.json").write_text(json.dumps({"outcome": "OOM", "message": ""}))
    (tmp_path / run.name / "command.json").write_text(json.dumps(command_of(limit)))

    check_kept(run, tmp_path, 24, limit)
    with pytest.raises(InputError, match="flags --memory_limit_mb 40; delete the folder"):
        check_kept(run, tmp_path, 24, ["--memory_limit_mb", "80"])


def test_tables_have_the_launch_with_the_median_speed_and_scaling_its_throughput_over_one_workers(tmp_path):
    keep(tmp_path, SweepRun("ddp", "gpt2", 4, 1))
    for repeat, speed in enumerate((190.0, 200.0, 230.0)):
        run = SweepRun("ddp", "gpt2", 4, 2, repeat)
        keep(tmp_path, run, samples_per_second=speed, step_ms=1600.0 / speed)

    write_tables(tmp_path)

    assert (tmp_path / "latency.csv").read_text() == "ddp,4\ngpt2,8.00\n"
    assert (tmp_path / "scaling.csv").read_text() == "framework,model,batch_size,1,2\nddp,gpt2,4,1.000,2.000\n"


def test_short_steps_are_measured_more_often(tmp_path):
    keep(tmp_path, SweepRun("ddp", "gpt2", 4, 2), step_ms=5.0)

    assert steps_for(SweepRun("ddp", "gpt2", 8, 2), tmp_path, seconds=2.0) == 200
    assert steps_for(SweepRun("ddp", "gpt2", 64, 2), tmp_path, seconds=2.0) == 20


def test_one_process_strategies_are_planned_on_one_worker_only():
    assert [run.workers for run in plan(["single", "ddp"], ["gpt2"], [1], [1, 2])] == [1, 1, 2]


def test_every_run_has_the_same_examples_in_a_step():
    _, runs, more = parse([*DEFAULTS, "--strategies", "single,ddp", "--", "--precision", "bf16"])

    assert [(run.strategy, run.workers, run.batch_size) for run in runs] == [
        ("single", 1, 16), ("ddp", 1, 16), ("ddp", 2, 8), ("ddp", 4, 4),
        ("single all cores", 1, 16), ("ddp again", 1, 16), ("ddp again", 2, 8), ("ddp again", 4, 4),
    ]  # fmt: skip
    assert more == ["--precision", "bf16"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "1,3"], "--examples_per_step: expected a multiple of 3, .* got 16; use 15, for example"),
        (["--examples_per_step", "0", "--workers", "2"], "--examples_per_step: expected a multiple of 2"),
        (["--steps", "0"], "--steps: expected 1 or more, got 0"),
        (["--strategies", "zero7"], "--strategies: expected names among single"),
    ],
)
def test_what_cannot_be_run_is_one_clear_line(words, message):
    with pytest.raises(InputError, match=message):
        parse([*DEFAULTS, *words])


@pytest.mark.parametrize("examples, validated", [(16, 64), (20, 60), (100, 50)])  # of 66
def test_validation_takes_the_same_examples_on_any_number_of_workers(examples, validated):
    for workers in (2, 4):
        arguments, (run, _), more = parse(
            [*DEFAULTS, "--strategies", "ddp", "--workers", str(workers), "--examples_per_step", str(examples)]
        )
        flag, count = flags_of(run, arguments, more)
        settings = SimpleNamespace(
            batch_size=run.batch_size, examples_per_step=examples, **{flag.removeprefix("--"): int(count)}
        )
        workload = Workload("gpt2", None, None, None, [], [{"ids": torch.tensor(number)} for number in range(66)])

        batches = [batch["ids"] for batch in workload.validation_batches(settings)]

        assert torch.cat(batches).tolist() == list(range(validated))


@pytest.mark.proof
def test_one_command_makes_the_runs_and_the_table_and_all_validation_losses_agree(tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "f"
    flags = ["--strategies", "single,ddp", "--workers", "1,2", "--steps", "6", "--examples_per_step", "4"]

    process = run_python("-m", "benchmark.frameworks", *flags, "--output_dir", folder, timeout=900)

    assert process.returncode == 0, process.stderr[-2000:]
    report = json.loads(process.stdout.splitlines()[-1])
    assert {(row["framework"], row["workers"]) for row in report["rows"]} == {
        ("single", 1), ("single all cores", 1), ("ddp", 1), ("ddp again", 1), ("ddp", 2), ("ddp again", 2)
    }  # fmt: skip
    assert all(row["gradient"] == "ok" for row in report["rows"])
    assert report["flagged"] == report["left_out"] == []
    losses = [row["validation_loss"] for row in report["rows"]]
    assert losses == pytest.approx([losses[0]] * 6, abs=1e-5)
    assert all(row["communication_s"] > 0 for row in report["rows"] if row["workers"] == 2)
    assert (folder / "frameworks.md").read_text() in process.stdout
    with (folder / "frameworks.csv").open() as file:
        assert ", load " in next(file)
        assert len(list(csv.DictReader(file))) == 6
