"""The table of all frameworks: same examples in every row, literal figures, losses that do not agree, real runs."""

import csv
import json

import pytest

from benchmark.frameworks import DEFAULTS
from benchmark.sweep import parse, validation_flags
from benchmark.tables import SweepRun, combined, csv_rows, disagreements, markdown, row_of, write_frameworks
from common.errors import InputError
from tests.own.started_processes import run as run_python


def result(speed: float, loss: float, **values) -> dict:
    return {
        "samples_per_second": speed,
        "wall_s": 4.0,
        "steps": {"dropped": 2, "timed": 20, "traced": 2},
        "communication": {"total_ms": 50.0, "exposed_ms": 10.0},
        "memory": {"persistent_counted": {"total": 3_000_000}, "peak": 5_000_000},
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


def test_what_was_not_measured_is_empty_and_a_column_without_a_figure_is_left_out():
    alone = {TWO: result(120.0, 2.0, communication={"total_ms": None, "exposed_ms": None}, evaluations=[])}

    row = row_of(TWO, alone)

    figures = ["gpt2-tiny", "ddp", "2", "4", "120.0000", "4.0000", "3.0000", "5.0000"]
    assert csv_rows([row])[1] == figures
    beside = [row, row_of(TWO, {TWO: result(120.0, 2.0)})]
    assert csv_rows(beside)[1] == [*figures[:6], "", "", *figures[6:], "", ""]
    assert " | - | - | 3.0000 | 5.0000 | - | - |" in markdown(beside).splitlines()[-2]


def test_of_several_launches_the_row_has_the_median_and_the_range():
    failed = {"outcome": "error", "message": ""}
    launches = [result(100.0, 2.0), failed, result(140.0, 2.0), result(120.0, 2.0)]

    row = row_of(TWO, RESULTS | {TWO: combined(launches)})

    assert [row[name] for name in ("examples_per_second", "slowest", "fastest")] == [120.0, 100.0, 140.0]
    assert combined([failed, failed]) == failed


@pytest.mark.parametrize("loss", [2.01, 1.99, float("nan")])
def test_a_framework_that_trains_something_else_is_flagged(loss):
    results = RESULTS | {TWO: result(500.0, loss)}

    flagged = disagreements([row_of(run, results) for run in results])

    assert len(flagged) == 1
    assert "gpt2-tiny, ddp, 2 workers: validation loss" in flagged[0]
    assert "but 2.000000 with single on 1" in flagged[0]


def test_the_table_has_the_fastest_framework_of_each_number_of_workers_first(tmp_path):
    launched = {SINGLE: [result(70.0, 2.0)], ONE: [result(80.0, 2.0)], TWO: [result(120.0, 2.5)]}
    for found in launched.values():
        found[0]["environment"] = {"load": 9.0, "cores": 2}
    versions = {"versions": {}, "cores": 2, "gpu": None, "load": 9.0, "commit": "c", "date": "today"}

    written = write_frameworks(tmp_path, launched, [], versions)

    assert [(row["framework"], row["workers"]) for row in written["rows"]] == [("ddp", 1), ("single", 1), ("ddp", 2)]
    assert len(written["flagged"]) == 1 and "with single on 1" in written["flagged"][0]
    assert len(written["busy"]) == 3
    assert (tmp_path / "frameworks.csv").read_text().startswith("# 2 cores, no GPU, load 9.0")


def test_every_run_has_the_same_examples_in_a_step():
    _, runs, more = parse([*DEFAULTS, "--strategies", "single,ddp", "--", "--precision", "bf16"])

    assert [(run.strategy, run.workers, run.batch_size) for run in runs] == [
        ("single", 1, 16), ("ddp", 1, 16), ("ddp", 2, 8), ("ddp", 4, 4),
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


@pytest.mark.parametrize(
    ("examples", "workers", "batches"),
    [
        (16, 4, 16),  # four steps' examples
        (20, 1, 3),  # the sample has 66: the same 60 for one worker and for four
        (20, 4, 12),
        (100, 2, 2),
    ],
)
def test_validation_takes_the_same_examples_on_any_number_of_workers(examples, workers, batches):
    pytest.importorskip("tensorboard")

    assert validation_flags("gpt2-tiny", examples, workers, []) == ["--eval_batches", str(batches)]


@pytest.mark.proof
def test_one_command_makes_the_runs_and_the_table_and_all_validation_losses_agree(tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "f"
    flags = ["--strategies", "single,ddp", "--workers", "1,2", "--steps", "6", "--examples_per_step", "4"]

    done = run_python("-m", "benchmark.frameworks", *flags, "--output_dir", folder, timeout=900)

    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {(row["framework"], row["workers"]) for row in found["rows"]} == {("single", 1), ("ddp", 1), ("ddp", 2)}
    assert found["flagged"] == found["left_out"] == []
    losses = [row["validation_loss"] for row in found["rows"]]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)
    assert all(row["communication_s"] > 0 for row in found["rows"] if row["workers"] == 2)
    assert (folder / "frameworks.md").read_text() in done.stdout
    with (folder / "frameworks.csv").open() as file:
        assert ", load " in next(file)
        assert len(list(csv.DictReader(file))) == 3
