"""What is alive is measured, what a step needs is predicted, and a limit ends a run with one line."""

import json

import pytest
import torch
from transformers import GPT2Config

from beyond.step_memory import fitting, gpt2_sizes, peak
from common.paths import ROOT
from common.peak_memory import MB, PeakMemory, alive_bytes
from staff.tests import workers
from staff.tests.warm import Script

CPU = torch.device("cpu")
LARGE = 20_000_000  # bytes of a tensor: far above what else is allocated meanwhile

if alive_bytes(CPU) is None:
    pytest.skip("the C library does not say what is alive", allow_module_level=True)


def tensor(size: int = LARGE) -> torch.Tensor:
    return torch.ones(size // 4)


def test_the_peak_is_what_was_alive_at_a_time_since_the_model_not_what_is_left_nor_what_loading_took():
    before = tensor()
    memory = PeakMemory(CPU)
    loading = tensor(3 * LARGE)
    del loading
    memory.start()

    two = [tensor(), tensor()]
    memory.sample()
    two.clear()
    one = tensor()
    memory.stop()

    assert memory.bytes == pytest.approx(2 * LARGE, rel=0.05)
    assert before.nbytes == one.nbytes == LARGE


UNDER_A_LIMIT = """
import torch
from common.errors import InputError
from common.peak_memory import PeakMemory

memory, kept = PeakMemory(torch.device("cpu")), []
try:
    with memory.limited(100, lambda: "by the prediction, less is needed"):
        for _ in range(50):
            block = torch.ones(5_000_000)  # 20 MB, given back each time
            del block
        print("blocks that are given back do not add up")
        kept += [torch.ones(5_000_000) for _ in range(10)]
except InputError as error:
    print(error)
print(torch.ones(50_000_000).numel(), "after the limit")
"""


def test_what_exceeds_a_limit_is_said_and_what_is_given_back_does_not_count(tmp_path):
    (tmp_path / "limit.py").write_text(UNDER_A_LIMIT)

    code = Script(tmp_path / "limit.py", (), tmp_path / "log").wait(timeout=60)

    assert code == 0, (tmp_path / "log").read_text()
    first, error, after = (tmp_path / "log").read_text().splitlines()
    assert first == "blocks that are given back do not add up"
    assert error.startswith("--memory_limit_mb: expected to need at most 100 MB on this worker, but 20 MB more did not")
    assert error.endswith("by the prediction, less is needed")
    assert after == "50000000 after the limit"


def test_zero3_keeps_the_promise_of_the_table_as_blocks_become_small():
    sizes = gpt2_sizes(GPT2Config(vocab_size=2048, n_positions=64, n_embd=256, n_layer=1000, n_head=4), length=1)
    sixteen = 4 * sizes.parameters  # values, gradients and two states

    assert peak("ddp", sizes, 1, 4) / sixteen == pytest.approx(1, rel=0.05)
    assert peak("zero2", sizes, 1, 4) / sixteen == pytest.approx(0.5, rel=0.05)  # 7 bytes, and a copy of the shards
    assert peak("zero3", sizes, 1, 4) / sixteen == pytest.approx(0.25, rel=0.05)


def test_the_advice_names_what_fits_and_not_what_has_just_failed():
    peaks = {"overlap": 700.0 * MB, "zero2": 400.0 * MB, "zero3": 250.0 * MB}

    assert (
        fitting("overlap", peaks, 4, 300) == "by the prediction, overlap needs 700 MB; these would fit: zero3 (250 MB)"
    )
    assert "zero3 (" not in fitting("zero3", peaks, 4, 300)
    assert "use more workers" in fitting("overlap", peaks, 4, 100)


@pytest.mark.medium
def test_a_run_of_the_bonus_reports_its_peak_and_ends_at_a_limit_with_one_line(tmp_path):
    script, words = ROOT / "beyond/run_gpt2.py", ("--strategy", "overlap", "--max_steps", 2, "--batch_size", 8)
    runs = workers.start(script, 1, tmp_path / "free", *words)
    runs += workers.start(script, 1, tmp_path / "limited", *words, "--memory_limit_mb", 5)

    assert workers.wait(runs) == [0, 2]
    memory = json.loads((tmp_path / "free/run/rank0.json").read_text())["memory"]
    assert memory["persistent_bytes"] < memory["peak_bytes"] < memory["process_peak_bytes"]
    assert "a step needs" in (tmp_path / "free/log0.txt").read_text()
    log = (tmp_path / "limited/log0.txt").read_text()
    assert log.count("--memory_limit_mb: expected to need at most 5 MB") == 1
    assert "Traceback" not in log
