"""What benchmark.sweep and benchmark.frameworks do before they measure: operators are built, strategies are proved."""

import json
from types import SimpleNamespace

import pytest

from benchmark import prove, sweep
from benchmark.engines import operators
from benchmark.sweep import proof_flags, prove_runs
from benchmark.tables import SweepRun
from common.paths import ROOT

HALF = {"gradient": "x 0.5000", "sentence": "zero0 with accumulation 1: x 0.5000", "left_out": ""}
REFUSED = {"gradient": "not proved", "sentence": "", "left_out": "--strategy tensor: expected other workers"}
RESULT = {
    "samples_per_second": 100.0, "step_ms": 10.0, "wall_s": 1.0, "memory": {"persistent_counted": 1, "peak": 1},
    "communication": {"total_ms": 1.0, "exposed_ms": 1.0}, "steps": {"timed": 2}, "losses": [2.0, 1.0],
}  # fmt: skip


@pytest.fixture
def done(monkeypatch):
    """What the command does, in order, instead of doing it: zero0 is wrong, tensor cannot be proved."""
    steps: list[object] = []

    def execute(run, folder, count, more):
        steps.append(run.strategy)
        return sweep.keep(folder / run.name / "result.json", RESULT)

    def prove_on_workers(words, settings, flags):
        steps.append(("proof", settings.model, settings.world_size, flags.names))
        known = {"zero0": HALF, "tensor": REFUSED}
        right = {"gradient": "ok", "sentence": "", "left_out": ""}
        return [{"strategy": name} | known.get(name, right) for name in flags.names.split(",")]

    monkeypatch.setattr(operators, "compile_operators", lambda names, no_cuda: steps.append(("operators", set(names))))
    monkeypatch.setattr(prove, "prove_on_workers", prove_on_workers)
    monkeypatch.setattr(sweep, "execute", execute)
    return steps


def run_main(monkeypatch, *words, main=sweep.main):
    monkeypatch.setattr("sys.argv", ["sweep", *map(str, words)])
    main()


def test_a_wrong_strategy_is_not_timed_but_named_and_the_exit_code_is_1(done, monkeypatch, tmp_path, capsys):
    words = ["--strategies", "zero0,ddp,single,tensor", "--workers", "1", "--batch_sizes", "4", "--steps", "4"]

    with pytest.raises(SystemExit, match=r"wrong: zero0 with accumulation 1: x 0\.5000"):
        run_main(monkeypatch, *words, "--output_dir", tmp_path)

    assert done[:2] == [
        ("operators", {"zero0", "ddp", "single", "tensor"}), ("proof", "gpt2-tiny", 1, "ddp,tensor,zero0")
    ]  # fmt: skip
    assert sorted(done[2:]) == ["ddp", "single", "tensor"]
    printed = capsys.readouterr()
    last = json.loads(printed.out.splitlines()[-1])
    assert last["wrong"] == {"zero0": "x 0.5000"}
    assert "gpt2-tiny-zero0-b4-w1: wrong: zero0 with" in last["failures"][0]
    assert "optimization_level0,4\ngpt2-tiny,wrong" in (tmp_path / "latency.csv").read_text()
    assert "not proved: --strategy tensor: expected other workers" in printed.err


def test_the_table_of_frameworks_says_whether_a_gradient_was_proved(done, monkeypatch, tmp_path, capsys):
    pytest.importorskip("tensorboard")  # a run's flags are checked, too
    words = ["--strategies", "ddp,single,tensor", "--workers", "1", "--examples_per_step", "4", "--steps", "4"]

    run_main(monkeypatch, *words, "--output_dir", tmp_path)

    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    gradients = {row["framework"]: row["gradient"] for row in rows}
    assert gradients.pop("tensor") == "not proved"
    assert gradients == dict.fromkeys(["ddp", "ddp again", "single", "single all cores"], "ok")


def test_single_on_all_cores_has_a_thread_for_each_core_and_the_others_as_many_as_are_set(monkeypatch, tmp_path):
    threads = {}

    def run(command, env, **_):
        threads[command[command.index("--output_dir") + 1]] = env["OMP_NUM_THREADS"]
        return SimpleNamespace(returncode=1, stderr="")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sweep.os, "sched_getaffinity", lambda _: range(7))
    monkeypatch.setattr(sweep.subprocess, "run", run)
    for strategy in ("single", "single all cores"):
        sweep.execute(SweepRun(strategy, "gpt2", 4, 1), tmp_path, 4, [])

    assert list(threads.values()) == ["1", "7"]


def test_a_rank_that_fails_ends_its_job_on_slurm():
    files = sorted((ROOT / "benchmark" / "slurm").glob("*.sbatch"))

    assert [file.name for file in files if "\nsrun --kill-on-bad-exit=1 " not in file.read_text()] == []
    assert len(files) == 6


def test_one_proof_for_each_kind_of_model_and_number_of_workers_and_none_again(done, tmp_path):
    runs = [SweepRun("ddp", model, 4, workers) for model in ("gpt2", "gpt2-24m", "t5-large") for workers in (2, 3)]

    proofs = prove_runs(runs, tmp_path, [])

    assert [step[1:3] for step in done] == [("gpt2-tiny", 2), ("gpt2-3x192", 3), ("t5-tiny", 2), ("t5-tiny", 3)]
    assert set(proofs) == {run.proof for run in runs}
    assert prove_runs(runs, tmp_path, []) == proofs
    assert len(done) == 4
    prove_runs(runs[:1], tmp_path, ["--precision", "bf16"])
    assert len(done) == 5


def test_the_proof_gets_the_flags_by_which_a_gradient_is_computed():
    more = ["--precision", "bf16", "--length", "128", "--bleu", "--accumulation=4", "--no_cuda"]

    assert proof_flags(more) == ["--precision", "bf16", "--accumulation", "4", "--no_cuda"]
    assert proof_flags(["--precision", "fp16"]) == []  # whose scaler skips steps
