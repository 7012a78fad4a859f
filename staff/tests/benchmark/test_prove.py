"""benchmark.prove: engines that are wrong on purpose are named, right ones are not."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmark.arguments import parse
from benchmark.proof.cases import Case, Reference
from benchmark.proof.judge import FP32, Observed, compare, judge
from benchmark.proof.wire import SentMessage, faults
from benchmark.prove import add_flags, small_model, that_run
from benchmark.strategies import add_engines
from common.errors import InputError
from common.paths import ROOT
from staff.tests.benchmark.broken_engines import WRONG
from staff.tests.cluster.started_processes import run
from staff.tests.workers import group

PROVE = ROOT / "benchmark" / "prove.py"
BANK = ROOT / "staff/tests/benchmark/broken_engines.py"
HAS_MEGATRON, HAS_HOROVOD = (importlib.util.find_spec(name) is not None for name in ("megatron", "horovod"))
TOO_LONG = 900  # seconds; a busy machine
SOME = [
    "one_percent", "bias_unreduced", "summed_micro_batches", "second_use_lost", "clip_half", "drifting_replica",
    "adam_rate_of_one_group",
]  # fmt: skip
RIGHT = ["Averaging", "Gathering"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts workers with gloo")


def rows_of(done) -> dict[str, dict]:
    return {row["strategy"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}


def prove(*words: object, folder: Path, **options):
    return run("-m", "benchmark.prove", *map(str, words), "--output_dir", folder, timeout=TOO_LONG, **options)


# --- two workers that are forked from a process which has loaded torch ---


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """The rows of right engines and of some wrong ones."""
    folder = tmp_path_factory.mktemp("prove")
    words = ["--engine", f"{BANK}:{','.join([*RIGHT, *SOME])}", "--output_dir", folder / "p"]
    codes = group(PROVE, 2, folder, *words)
    assert codes == [1, 0], (folder / "log0.txt").read_text()[-2000:]
    return {row["strategy"]: row for row in json.loads((folder / "p" / "proof.json").read_text())}


@pytest.mark.medium
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_engine_is_ok(some, name):
    assert some[name]["gradient"] == "ok"
    assert len(some[name]["cases"]) == 5


@pytest.mark.medium
@pytest.mark.parametrize("name", SOME)
def test_a_wrong_engine_is_named_with_what_is_wrong(some, name):
    assert re.search(WRONG[name][0], some[name]["sentence"]), some[name]


# --- the whole bank, and all strategies ---


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_wrong_engine_of_the_bank_is_named(precision, tmp_path):
    names = [name for name, (_, shown_by) in WRONG.items() if shown_by == precision]
    done = prove("--engine", f"{BANK}:{','.join(names)}", "--precision", precision, folder=tmp_path / "p")

    rows = rows_of(done)

    assert done.returncode == 1
    assert list(rows) == names
    missed = {name: row["sentence"] for name, row in rows.items() if not re.search(WRONG[name][0], row["sentence"])}
    assert missed == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "precision", "count"),
    [(2, "fp32", 18 + HAS_MEGATRON), (3, "fp32", 16), (2, "bf16", 14), (3, "bf16", 14)],  # three cannot cut four heads
)
def test_every_strategy_is_right(workers, precision, count, tmp_path):
    pytest.importorskip("deepspeed")
    done = prove("--workers", workers, "--precision", precision, folder=tmp_path / "p")

    rows = rows_of(done)

    assert done.returncode == 0, done.stderr[-2000:]
    assert len(rows) == HAS_HOROVOD + count
    assert all(row["gradient"] == "ok" for row in rows.values())


@pytest.mark.medium
@pytest.mark.parametrize(
    ("names", "words"),
    [("ddp,fsdp,own_overlap,own_zero3", ["--model", "llama-tiny"]), ("fsdp", ["--precision", "bf16"])],
    ids=["llama", "bf16"],
)
def test_strategies_are_right_with_a_llama_and_in_half_precision_too(names, words, tmp_path):
    """RMSNorm, rotary positions, SwiGLU, and queries that share keys; gradients are not rounded on their way."""
    codes = group(PROVE, 2, tmp_path, *words, "--strategies", names, "--output_dir", tmp_path / "p")

    rows = json.loads((tmp_path / "p" / "proof.json").read_text())
    assert {row["strategy"]: row["gradient"] for row in rows} == dict.fromkeys(names.split(","), "ok")
    assert codes == [0, 0]


@pytest.mark.medium
def test_strategies_are_right_with_compiled_blocks_too(tmp_path):
    """The backend traces forward and backward as inductor does, and needs no compiler."""
    names = "ddp,fsdp,own_zero3"
    words = ["--compile", "aot_eager", "--strategies", f"{names},own_tensor", "--output_dir", tmp_path / "p"]

    codes = group(PROVE, 2, tmp_path, *words)

    rows = json.loads((tmp_path / "p" / "proof.json").read_text())
    assert {row["strategy"]: row["gradient"] for row in rows} == dict.fromkeys(names.split(","), "ok")
    assert codes == [0, 0] and "own_tensor cuts blocks, and --compile" in (tmp_path / "log0.txt").read_text()


@pytest.mark.medium
def test_what_cuts_the_model_is_right_with_several_micro_batches_and_megatron_with_a_vocabulary_that_leaves_a_rest(
    tmp_path,
):
    names = ["pipeline", "own_1f1b", *(["megatron"] if HAS_MEGATRON else [])]

    codes = group(PROVE, 2, tmp_path, "--strategies", ",".join(names), "--output_dir", tmp_path / "p")

    rows = json.loads((tmp_path / "p" / "proof.json").read_text())
    assert {row["strategy"]: row["gradient"] for row in rows} == dict.fromkeys(names, "ok")
    assert codes == [0, 0]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_HOROVOD, reason="needs Horovod, built from source: python install.py horovod")
def test_horovod_is_right_and_trains_as_ddp_does(tmp_path):
    words = ["--strategies", "ddp,horovod", "--workers", "2", "--max_steps", "6", "--output_dir", tmp_path / "c"]

    proof = prove("--strategies", "horovod", "--workers", 3, "--precision", "bf16", folder=tmp_path / "p")
    done = run("-m", "benchmark.compare", *words, timeout=TOO_LONG)

    assert proof.returncode == 0 and rows_of(proof)["horovod"]["gradient"] == "ok"
    assert done.returncode == 0, done.stderr[-2000:]
    ddp, horovod = (rows_of(done)[name] for name in ("ddp", "horovod"))
    assert horovod["last_loss"] == pytest.approx(ddp["last_loss"], rel=1e-6)
    assert horovod["sent_bytes"] == ddp["sent_bytes"] and horovod["exposed_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--strategies", "ddp,fsdp,own_zero2,own_zero3", "--model", "t5-tiny"],  # a model with two stacks
        *(
            ["--strategies", "own_grid", "--grid", grid, "--workers", 4]
            for grid in ("data=2,tensor=2", "pipeline=2,tensor=2", "pipeline=2,data=2")
        ),
    ],
    ids=str,
)
def test_another_model_and_every_grid_are_right(words, tmp_path):
    done = prove(*words, folder=tmp_path / "p")

    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_an_engine_that_stops_the_workers_is_named_and_the_others_are_proved(tmp_path):
    words = ["--engine", f"{BANK}:hanging,Averaging", "--hang_seconds", "20"]
    done = prove(*words, folder=tmp_path / "p")

    rows = rows_of(done)

    assert rows["hanging"]["gradient"] != "ok"
    assert rows["Averaging"]["gradient"] == "ok"


def test_an_engine_that_is_not_there_is_one_clear_line():
    with pytest.raises(InputError, match=r"--engine: .*no_such_engine"):
        add_engines(f"{BANK}:no_such_engine", "ddp")


def test_a_large_model_is_proved_by_a_small_one_that_can_be_cut_for_the_workers():
    assert [small_model("gpt2", workers) for workers in (1, 2, 3, 4, 6, 9)] == [
        "gpt2-tiny", "gpt2-tiny", "gpt2-3x192", "gpt2-tiny", "gpt2-6x384", "gpt2-tiny"
    ]  # fmt: skip
    assert small_model("t5-large", 3) == "t5-tiny"


def test_what_cannot_be_proved_here_says_why():
    settings, _ = parse(["--world_size", "9", "--no_cuda"], "prove", add_flags=add_flags)

    (runs,), (left_out,) = that_run(settings, ["ddp", "own_tensor"])

    assert runs == "ddp"
    assert left_out.row()["gradient"] == "not proved"
    assert "4 attention heads" in left_out.row()["left_out"]


# --- the judge alone ---


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        ((1, 1, 1), ""),
        ((0.5, 0.5, 0.5), "x 0.5000 (every parameter)"),
        ((1, 2, 1), "x 2.0000 (b)"),
        ((1, 1.002, 1), "x 1.0020 (b)"),
        ((1, 1, math.nan), "nan (c)"),
        ((1, None, 1), "missing (b)"),
    ],
)
def test_a_factor_is_named_with_its_parameter(factors, says):
    torch.manual_seed(1)
    names = ("transformer.a", "transformer.b", "c")
    before, want = ({name: torch.randn(8, 8, dtype=torch.float64) for name in names} for _ in range(2))
    got = {name: want[name] * factor for name, factor in zip(names, factors, strict=True) if factor is not None}

    assert compare(got, want, before, FP32).fault == says


def test_each_step_is_judged_by_its_own_change():
    torch.manual_seed(1)
    case = Case("accumulation 1", 1)
    start, first, second = ({"a": torch.randn(8, 8, dtype=torch.float64)} for _ in range(3))
    after = {"a": start["a"] - first["a"]}
    right, doubled = ({"a": after["a"] - factor * second["a"]} for factor in (1, 2))
    is_noise = {"a": torch.zeros(8, 8, dtype=torch.bool)}
    reference = Reference(0.0, [start, after, right], [1.0, 1.0], [1.0, 1.0], is_noise)
    observed = Observed([start, after, doubled], [None, None], [1.0, 1.0])

    result = judge(case, "fp32", reference, observed, [], [])

    assert result.faults == ["x 2.0000 (every parameter) in step 2"]


def test_a_message_in_another_dtype_and_a_missing_gradient_are_named():
    promised = (torch.float32, torch.bfloat16)
    right = [SentMessage("all_reduce", torch.float32, 4000), SentMessage("all_gather", torch.bfloat16, 4000)]
    a_norm = SentMessage("all_reduce", torch.float64, 1)

    assert faults([*right, a_norm], promised, 4000) == []
    (other_dtype,) = faults([SentMessage("all_to_all", torch.bfloat16, 4000)], promised, 4000)
    assert "all_to_all sends bfloat16" in other_dtype
    (too_few,) = faults(right, promised, 8001)
    assert "8000" in too_few and "8001" in too_few
