"""Our own tests of pipeline/run_gpt2.py, its figures, and the pipeline over processes."""

import itertools
import json
import sys

import pytest
import torch

from cluster.launch import free_port
from common.arguments import parse_gpt2_arguments
from common.paths import ROOT, import_file
from pipeline import mode_comparison
from tests.own.pipeline_stages import no_worker_is_left
from tests.own.warm import Script

pytestmark = pytest.mark.medium

__all__ = ["no_worker_is_left"]  # a fixture for every test here
MODES = ("none", "model_parallel", "pipeline_parallel")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of the script in each mode, in this process: the folders of the records, in one folder."""
    folder, threads = tmp_path_factory.mktemp("runs"), torch.get_num_threads()
    script = import_file(ROOT / "pipeline" / "run_gpt2.py", "run_gpt2")
    flags = "--max_steps 3 --batch_size 10 --n_chunk 4 --model_max_length 16 --dropout 0 --no_cuda --output_dir"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mode_comparison, "FOLDER", folder / "figures")
        for mode in MODES:
            words = ["run_gpt2.py", "--model_parallel_mode", mode, *flags.split(), str(folder / mode)]
            patch.setattr(sys, "argv", words)
            script.main()
            torch.set_num_threads(threads)
    return folder


def boxes_of(folder):
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def losses(folder):
    return [float(line) for line in (folder / "loss_0.txt").read_text().split()]


def test_all_modes_train_alike_and_leave_record_and_trace_and_no_figures_in_a_folder_of_their_own(runs):
    expected = losses(runs / "none")

    assert len(expected) == 3
    for folder in (runs / mode for mode in MODES):
        assert losses(folder) == pytest.approx(expected, abs=1e-5)
        assert (folder / "trace.png").exists()
        assert len(json.loads((folder / "rank0.json").read_text())["iterations"]) == 3
    assert not (runs / "figures").exists()


def test_the_trace_of_model_parallel_shows_one_partition_at_a_time(runs):
    boxes = sorted(boxes_of(runs / "model_parallel"), key=lambda box: box["ts"])
    order = (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0))
    assert [(box["cat"], box["tid"]) for box in boxes] == [row for row in order for _ in range(2)]
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in itertools.pairwise(boxes))


def test_the_figures_show_runs_in_the_default_folder_and_only_a_pipeline_has_micro_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(mode_comparison, "FOLDER", tmp_path)

    def compare(mode, n_chunk, *flags):
        one = {"mean": 1.0, "std": 0.0}
        config = parse_gpt2_arguments("pipeline", ["--model_parallel_mode", mode, "--n_chunk", n_chunk, *flags])
        mode_comparison.compare_modes(config, {"training_time": one, "tokens_per_second": one})

    for mode in MODES:
        compare(mode, "3")
    compare("pipeline_parallel", "5", "--output_dir", str(tmp_path / "elsewhere"))

    kept = json.loads((tmp_path / "pipeline_metrics.json").read_text())
    assert [row.get("n_chunk") for row in kept.values()] == [None, None, 3]
    assert {path.name for path in tmp_path.glob("*.png")} == {name for _, name in mode_comparison.FIGURES.values()}


PROCESS = """
import sys, torch
from transformers import GPT2Config
from pipeline.distributed import PipelinedProcesses, join_pipeline
from pipeline.model_parallel import GPT2LMHeadModelParallel
torch.set_num_threads(1)
rank, world_size, port = map(int, sys.argv[1:])
config = GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=50, n_positions=16, embd_pdrop=0.0, attn_pdrop=0.0,
                    resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)
join_pipeline("127.0.0.1", port, world_size, rank, "gloo")
for schedule in ("gpipe", "1f1b", "interleaved"):
    torch.manual_seed(0)
    plain, spread = GPT2LMHeadModelParallel(config), GPT2LMHeadModelParallel(config)
    spread.load_state_dict(plain.state_dict())
    processes = PipelinedProcesses(spread, schedule, 4, torch.device("cpu"))
    for _ in range(2):  # gradients add up, as usual
        tokens = torch.randint(0, 50, (8, 10))
        loss, wanted = processes.forward_backward(tokens), plain(tokens, labels=tokens).loss
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach())
    for max_norm in (float("inf"), 0.1):
        processes.clip_gradients(None, max_norm)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        mine = set(processes.parameters)
        here = [(a, b) for a, b in zip(plain.parameters(), spread.parameters()) if b in mine]
        assert len(here) == len(processes.parameters)
        for a, b in here:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6)
    print(schedule, len(here))
torch.distributed.destroy_process_group()
"""


def test_over_processes_loss_and_every_gradient_are_those_of_the_plain_model(tmp_path):
    port = str(free_port())
    (tmp_path / "process.py").write_text(PROCESS)
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    ranks = [Script(tmp_path / "process.py", (rank, 2, port), log) for rank, log in enumerate(logs)]

    codes = [rank.wait(timeout=120) for rank in ranks]

    for code, log in zip(codes, logs, strict=True):
        assert code == 0, log.read_text()
        schedules = [line.split()[0] for line in log.read_text().splitlines() if line.endswith(tuple("0123456789"))]
        assert schedules == ["gpipe", "1f1b", "interleaved"]
