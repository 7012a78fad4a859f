"""The table of benchmark.compare, from made-up rounds."""

import pytest

from benchmark.arguments import parse
from benchmark.compare import evaluate, notes_of, table

NO_GPU = {"gpu": None}
FIGURES = {"peak_bytes": 3e6, "sent_bytes": 2e6, "exposed_ms": 1.5}


def compared(rounds, ms, gpu=NO_GPU, **figures):
    """Settings and rows of two workers; ms: by label, what a step takes in even and in odd rounds."""
    flags = ["--world_size", "2", "--max_steps", str(rounds + 3), "--batch_size", "4", "--length", "64"]
    settings, _ = parse(flags, "compare", add_flags=lambda parser: None)  # as compare does: it needs no TensorBoard
    steps = rounds + 3
    measured = {
        "labels": list(ms),
        "seconds": [[times[number % 2] / 1e3 for times in ms.values()] for number in range(steps)],
        "losses": [[6.5] * steps for _ in ms],
        "norms": [[1.25] * steps for _ in ms],
        "figures": [[FIGURES | figures for _ in ms] for _ in range(2)],
        "proofs": [{"strategy": "zero0", "gradient": "x 0.5000", "sentence": "zero0: x 0.5000"}],
    }
    return settings, evaluate(settings, "ddp", measured, gpu)


def test_rows_are_ordered_by_speed_and_a_wrong_strategy_comes_last_without_a_time():
    settings, rows = compared(20, {"single": (40, 40), "ddp": (20, 20), "fsdp": (10, 10)})

    assert [row["strategy"] for row in rows] == ["fsdp", "ddp", "single", "zero0"]
    head, *lines = [line.split("  ") for line in table(settings, rows, "ddp").splitlines()[1:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in (head, *lines)]
    assert cells[0] == [
        "strategy", "ms per step", "ratio to ddp [95 %]", "tokens/s", "peak MB", "sent MB", "exposed ms", "norm",
        "loss", "from single", "gradient",
    ]  # fmt: skip
    assert cells[1] == [
        "fsdp", "10.0", "0.500 [0.500, 0.500]", "51200", "3.0", "2.00", "1.50", "1.2500", "6.50000", "0.0e+00", "ok"
    ]  # fmt: skip
    assert cells[4] == ["zero0", "x 0.5000"]


def test_a_column_that_nobody_could_measure_is_left_out_and_a_known_gpu_adds_the_utilisation():
    settings, rows = compared(20, {"single": (40, 40), "ddp": (20, 20)}, {"gpu": "NVIDIA A100"}, exposed_ms=None)

    head = table(settings, rows, "ddp").splitlines()[1]
    assert "exposed" not in head
    assert "MFU %" in head
    assert rows[0]["mfu"] == pytest.approx(2 * rows[1]["mfu"])


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
