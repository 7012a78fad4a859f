"""The table of benchmark.compare, from made-up rounds; and of compare A.json B.json: the same strategies twice."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmark.arguments import parse
from benchmark.compare import evaluate, fault, notes_of, table
from benchmark.measure.two_results import compare_results
from benchmark.prove import verdict
from common.errors import InputError

NO_GPU = {"gpu": None}
FIGURES = {
    "peak_bytes": 3e6, "sent_bytes": 2e6, "exposed_ms": 1.5, "waiting_ms": 0.5, "sent_as": "float32", "metric": None,
}  # fmt: skip


def proofs_of(*names):
    """Rows of the proof: zero0 is wrong, and own_tensor could not be proved."""
    half, refused = {"gradient": "x 0.5000", "sentence": "zero0: x 0.5000"}, {"gradient": "not proved", "sentence": ""}
    others = {"zero0": half, "own_tensor": refused}
    return [{"strategy": name, "gradient": "ok", "sentence": ""} | others.get(name, {}) for name in [*names, "zero0"]]


def compared(rounds, ms, gpu=NO_GPU, **figures):
    """Settings and rows of two workers; ms: by label, what a step takes in even and in odd rounds."""
    flags = ["--world_size", "2", "--max_steps", str(rounds + 3), "--batch_size", "4", "--length", "64"]
    settings, _ = parse(flags, "compare", add_flags=lambda parser: None)  # as compare does: it needs no TensorBoard
    settings = replace(settings, no_cuda=gpu is NO_GPU)  # however many GPUs this machine has
    steps = rounds + 3
    measured = {
        "labels": list(ms),
        "seconds": [[times[number % 2] / 1e3 for times in ms.values()] for number in range(steps)],
        "losses": [[6.5] * steps for _ in ms],
        "norms": [[1.25] * steps for _ in ms],
        "figures": [[FIGURES | figures for _ in ms] for _ in range(2)],
        "proofs": proofs_of(*ms),
    }
    return settings, evaluate(settings, "ddp", measured, gpu)


def test_rows_are_ordered_by_speed_and_a_wrong_strategy_comes_last_without_a_time():
    settings, rows = compared(20, {"single": (40, 40), "ddp": (20, 20), "fsdp": (10, 10)})

    assert [row["strategy"] for row in rows] == ["fsdp", "ddp", "single", "zero0"]
    head, *lines = [line.split("  ") for line in table(settings, rows, "ddp").splitlines()[1:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in (head, *lines)]
    assert cells[0] == [
        "strategy", "ms per step", "ratio to ddp [95 %]", "tokens/s", "peak MB", "sent MB", "sent as", "exposed ms",
        "waiting ms", "norm", "loss", "from single", "gradient",
    ]  # fmt: skip
    assert cells[1] == [
        "fsdp", "10.0", "0.500 [0.500, 0.500]", "51200", "3.0", "2.00", "float32", "1.50", "0.50", "1.2500", "6.50000",
        "0.0e+00", "ok",
    ]  # fmt: skip
    assert cells[4] == ["zero0", "x 0.5000"]


def test_a_column_that_nobody_could_measure_is_left_out_and_a_known_gpu_adds_the_utilisation():
    settings, rows = compared(20, {"single": (40, 40), "ddp": (20, 20)}, {"gpu": "NVIDIA A100"}, exposed_ms=None)

    head = table(settings, rows, "ddp").splitlines()[1]
    assert "exposed" not in head
    assert "MFU %" in head
    assert rows[0]["mfu"] == pytest.approx(2 * rows[1]["mfu"])


@pytest.mark.parametrize(("bleu", "heading"), [(False, "metric"), (True, "BLEU")])
def test_what_a_trained_model_is_worth_has_a_column(bleu, heading):
    settings, rows = compared(20, {"single": (40, 40), "ddp": (20, 20)}, metric=12.5)

    head, first, *_ = table(replace(settings, bleu=bleu), rows, "ddp").splitlines()[1:]

    assert heading in head.split()
    assert "12.5000" in first.split()


def test_a_strategy_without_a_proof_is_timed_but_not_called_ok():
    settings, rows = compared(20, {"single": (40, 40), "ddp": (20, 20), "own_tensor": (10, 10)})

    assert [(row["strategy"], row["gradient"]) for row in rows] == [
        ("own_tensor", "not proved"), ("ddp", "ok"), ("single", "ok"), ("zero0", "x 0.5000"),
    ]  # fmt: skip
    assert table(settings, rows, "ddp").splitlines()[2].endswith("0.0e+00  not proved")
    assert verdict(rows) == "wrong: zero0: x 0.5000"


@pytest.mark.parametrize(("norm", "says"), [(1.25, ""), (0.0, "norm x 0.0000 in step 2"), (None, "")])
def test_a_norm_of_zero_is_a_fault_and_a_missing_one_is_not(norm, says):
    settings, _ = compared(1, {"single": (40, 40), "ddp": (20, 20)})

    assert fault(settings, np.ones(2), [1.25, norm], [1.25, 1.25]) == says


@pytest.mark.parametrize(
    ("rounds", "ddp", "note"),
    [
        (10, (20, 20), "note: 10 rounds are few for these intervals"),
        (20, (20, 20), ""),
        (20, (10, 40), "; --max_steps 83 narrows them"),
    ],
)
def test_few_rounds_and_wide_intervals_are_said(rounds, ddp, note):
    settings, rows = compared(rounds, {"single": (40, 40), "ddp": (20, 20), "fsdp": ddp})

    notes = [line for line in notes_of(settings, rows, "ddp", []) if "rounds" in line]

    assert len(notes) == bool(note)
    assert note in "".join(notes)


def written(path, steps_ms, versions="2.13", **settings):
    rows = [{"strategy": label, "step_ms": sorted(times)[len(times) // 2]} for label, times in steps_ms.items()]
    environment = {"versions": {"torch": versions}, "host": "here"}
    settings = {"model": "gpt2-tiny", "output_dir": str(path)} | settings
    path.write_text(json.dumps({"rows": rows, "steps_ms": steps_ms, "settings": settings, "environment": environment}))
    return path


def test_what_is_faster_slower_and_undecided_is_said_with_its_interval(tmp_path):
    steady, noisy = [10.0, 10.1, 10.2] * 5, [9.0, 10.0, 11.0] * 5
    left = written(tmp_path / "a.json", {"ddp": steady, "fsdp": steady, "zero1": noisy, "gone": steady})
    faster = [0.8 * time for time in steady]
    right = written(tmp_path / "b.json", {"ddp": faster, "fsdp": [2 * t for t in steady], "zero1": noisy}, "2.15")

    text = compare_results(left, right)

    rows = json.loads(text.splitlines()[-1])["rows"]
    assert {row["strategy"]: row["verdict"] for row in rows} == {
        "ddp": "B is faster", "fsdp": "B is slower", "zero1": "no difference that these rounds show"
    }  # fmt: skip
    assert rows[0]["ratio_95"][0] < 0.8 < rows[0]["ratio_95"][1]
    assert "A and B differ in: torch 2.13 and 2.15" in text


def test_few_rounds_decide_nothing(tmp_path):
    left, right = (written(tmp_path / name, {"ddp": [time] * 3}) for name, time in (("a.json", 1.0), ("b.json", 9.0)))

    assert "too few rounds to say" in compare_results(left, right)


def test_other_settings_and_other_files_are_refused(tmp_path):
    left = written(tmp_path / "a.json", {"ddp": [1.0] * 9})
    right = written(tmp_path / "b.json", {"ddp": [1.0] * 9}, batch_size=8, model="gpt2")
    (tmp_path / "c.json").write_text("{}")

    with pytest.raises(InputError, match="different settings: model gpt2-tiny and gpt2"):
        compare_results(left, right)
    with pytest.raises(InputError, match=r"expected a comparison.json of benchmark.compare, got .*c.json"):
        compare_results(left, tmp_path / "c.json")
