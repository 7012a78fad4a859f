"""The command line: defaults, what wins over what, where the record goes, and mistakes that are said in one line."""

import re
from pathlib import Path

import pytest

from common.arguments import (
    parse_beyond_arguments,
    parse_glue_arguments,
    parse_gpt2_arguments,
    parse_traffic_arguments,
    parse_worker_arguments,
)
from common.config import Grid
from common.errors import InputError
from common.paths import ROOT, cache_dir

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.10.1.1", "MASTER_PORT": "7000"}
REAL = "--data_dir docs --model_name_or_path tiny "  # data of one's own has other defaults than the sample


def parse(script: str, flags: str = ""):
    """The configuration that a script makes of its flags; `script` is a task's folder, with "gpt2" behind it or not."""
    task, _, is_gpt2 = script.partition(" ")
    words = flags.split()
    if task == "beyond":
        return parse_beyond_arguments(words)
    if task == "hello":
        return parse_worker_arguments(task, words)
    if is_gpt2:
        return parse_gpt2_arguments(task, words, world_size=2 if task == "task2b_allreduce" else 1)
    return (parse_traffic_arguments if task == "task4_traffic" else parse_glue_arguments)(task, words)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The command is given in the repository, and not by torchrun."""
    monkeypatch.chdir(ROOT)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("script", "flags", "expected"), [
    ("task1_single", "", {
        "data_dir": None, "do_train": True, "do_eval": True, "rank": 0, "world_size": 1, "learning_rate": 1e-3,
        "num_train_epochs": 8, "max_seq_length": 32, "per_gpu_train_batch_size": 64, "per_gpu_eval_batch_size": 64,
        "seed": 42, "warmup_steps": 0, "weight_decay": 0.0, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "max_steps": 0,
        "dropout": None, "task_name": "rte", "do_lower_case": False, "timeline": 0, "profile": False,
        "master_ip": "127.0.0.1", "master_port": 6585, "backend": "gloo",
    }),
    ("task1_single", REAL, {"learning_rate": 5e-5, "num_train_epochs": 3, "max_seq_length": 128}),
    ("task1_single", f"{REAL} --task_name SST-2 --max_steps -3", {"task_name": "sst-2", "max_steps": 0}),
    ("task2a_gather_scatter", "--world_size 4 --local_rank 3", {"rank": 3, "per_gpu_train_batch_size": 16}),  # of 64
    ("task1_single", "--do_train", {"do_train": True, "do_eval": False}),
    ("task1_single", "--do_eval", {"do_train": False, "do_eval": True}),
    ("task1_single", "--num_train_epochs 3.0", {"num_train_epochs": 3}),  # as the course writes it
    ("task1_single", "--learning_rate 0.5 --max_seq_length 9", {"learning_rate": 0.5, "max_seq_length": 9}),
    ("task1_single", "--timeline", {"timeline": 3}),
    ("task1_single", "--timeline 20", {"timeline": 20}),
    ("task4_traffic", "", {"grad_dtype": "fp32", "interface": "", "link_rate": None}),
    ("task3_ddp gpt2", "", {"learning_rate": 1e-3, "model_max_length": 64, "batch_size": 64, "n_epochs": 2}),
    ("task3_ddp gpt2", REAL, {"learning_rate": 1e-4, "model_max_length": 128}),
    ("task2b_allreduce gpt2", "", {"world_size": 2, "rank": 0, "master_port": 11868, "pytest": False}),
    ("task2b_allreduce gpt2", "--pytest True", {"pytest": True}),
    ("task2b_allreduce gpt2", "--pytest False --world_size 4", {"pytest": False, "world_size": 4}),
    ("pipeline gpt2", "", {"n_chunk": 4, "schedule": "threads", "model_parallel_mode": "none"}),
    ("beyond", "--bucket_mb 0.5", {"strategy": "ring", "bucket_bytes": 2**19, "grid": Grid(data=1), "n_chunk": 4}),
    ("beyond", "--strategy tensor --world_size 2 --local_rank 1", {"grid": Grid(tensor=2)}),
    ("beyond", "--strategy 1f1b --world_size 2 --local_rank 1", {"grid": Grid(pipeline=2), "schedule": "1f1b"}),
    ("beyond", "--strategy grid --world_size 4 --local_rank 1", {"grid": Grid(data=2, tensor=2)}),
    ("beyond", "--strategy grid --grid pipeline=2,data=1 --world_size 2 --local_rank 1", {"grid": Grid(pipeline=2)}),
])  # fmt: skip
def test_defaults_and_flags(script, flags, expected):
    config = parse(script, flags)

    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(("script", "flags", "environment", "expected"), [
    ("task3_ddp", "", TORCHRUN,
     {"rank": 5, "world_size": 8, "rank_on_node": 1, "master_ip": "10.10.1.1", "master_port": 7000}),
    ("task3_ddp", "--local_rank 2 --world_size 3 --master_ip 10.0.0.9 --master_port 9000", TORCHRUN,
     {"rank": 2, "world_size": 3, "master_ip": "10.0.0.9", "master_port": 9000}),
    ("task3_ddp", "", {"RANK": "5", "MASTER_PORT": "7000"}, {"rank": 0, "world_size": 1, "master_port": 6585}),
    ("task2b_allreduce gpt2", "", {"MASTER_PORT": "7000"}, {"master_port": 7000}),
    ("task2b_allreduce gpt2", "--master_port 9000", {"MASTER_PORT": "7000"}, {"master_port": 9000}),
    # What the flags give, the environment may spoil: Kubernetes puts an address into MASTER_PORT.
    ("task3_ddp", "--local_rank 2 --world_size 3 --master_port 9000",
     {"RANK": "", "WORLD_SIZE": "four", "MASTER_PORT": "tcp://10.0.0.1:80"},
     {"rank": 2, "world_size": 3, "master_port": 9000}),
    ("task2b_allreduce gpt2", "--master_port 9000", {"MASTER_PORT": "tcp://10.0.0.1:80"}, {"master_port": 9000}),
    ("task3_ddp", "--local-rank 1", TORCHRUN, {"rank": 5, "rank_on_node": 1}),  # of torch.distributed.launch
    ("task3_ddp", "--local-rank 1 --world_size 2", {}, {"rank": 1, "world_size": 2}),
])  # fmt: skip
def test_a_flag_wins_over_the_environment_which_wins_over_the_default(
    monkeypatch, script, flags, environment, expected
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    config = parse(script, flags)

    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(("script", "name", "value", "flag"), [
    ("task3_ddp", "RANK", "", "--local_rank"),
    ("task3_ddp", "WORLD_SIZE", "four", "--world_size"),
    ("task3_ddp", "MASTER_PORT", "tcp://10.0.0.1:80", "--master_port"),
    ("task2b_allreduce gpt2", "MASTER_PORT", "tcp://10.0.0.1:80", "--master_port"),
])  # fmt: skip
def test_a_word_in_the_environment_where_a_number_belongs_is_named_with_the_flag_that_replaces_it(
    monkeypatch, script, name, value, flag
):
    for variable, text in ({name: value} if "gpt2" in script else TORCHRUN | {name: value}).items():
        monkeypatch.setenv(variable, text)

    with pytest.raises(InputError, match=f"{name} in the environment: expected a whole number, got .*pass {flag}"):
        parse(script, "")


def test_the_cache_is_where_the_environment_says_or_in_the_repository_or_where_one_can_write(monkeypatch, tmp_path):
    for value, expected in ((str(tmp_path / "a"), tmp_path / "a/models"), ("", ROOT / ".cache/models")):
        monkeypatch.setenv("COS598D_CACHE", value)
        assert cache_dir("models") == expected
    monkeypatch.setenv("COS598D_CACHE", str(ROOT / "README.md"))
    assert cache_dir("models").parent.name.startswith("cos598d-cache-")


@pytest.mark.parametrize(("script", "flags", "folder"), [
    ("task1_single", "", "task1_single"),
    ("task3_ddp gpt2", "", "task3_ddp_gpt2"),
    ("pipeline gpt2", "--model_parallel_mode pipeline_parallel", "pipeline"),
    ("pipeline gpt2", "--model_parallel_mode model_parallel", "pipeline_model_parallel"),
    ("pipeline gpt2", "--schedule gpipe", "pipeline_gpipe"),
    ("beyond", "--strategy zero1", "beyond_zero1"),
    ("beyond", "--strategy 1f1b --schedule gpipe", "beyond_1f1b_gpipe"),
])  # fmt: skip
def test_every_task_and_mode_has_a_folder_for_its_records_where_the_report_finds_it(script, flags, folder, tmp_path):
    assert parse(script, flags).output_dir == ROOT / "runs" / folder
    assert parse(script, f"{flags} --output_dir {tmp_path}/a/b").output_dir == tmp_path / "a/b"


@pytest.mark.parametrize(("script", "flags", "words"), [
    ("task1_single", "--per_gpu_train_batch_size 0", "--per_gpu_train_batch_size: expected 1 or more, got 0"),
    ("task1_single", "--max_seq_length 7", "--max_seq_length: expected 8 or more"),
    ("task1_single", "--weight_decay -1", "--weight_decay: expected 0 or more"),
    ("task1_single", "--learning_rate 0", "--learning_rate: expected a number above 0"),
    ("task1_single", "--learning_rate nan", "--learning_rate: expected a number above 0, got nan"),
    ("task1_single", "--dropout 1", "--dropout: expected a probability of at least 0 and below 1"),
    ("task1_single", "--task_name RTX", "--task_name: expected one of cola, .*rte.*; got 'rtx'"),
    ("task1_single", "--task_name SST-2", "sst-2: the embedded sample has RTE alone; .* as --data_dir"),
    ("task1_single", "--data_dir nowhere", "--data_dir: there is no folder nowhere"),
    ("task1_single", "--model_name_or_path common", "--model_name_or_path: common is not a model: it has no config"),
    ("task1_single", "--output_dir common", "--output_dir: .*common is not empty; .* --overwrite_output_dir"),
    ("task1_single", "--check_gradients", "--check_gradients needs --dropout 0"),
    ("task3_ddp", "--world_size 2 --local_rank 2", "--local_rank: expected 0 to 1 .*; got 2"),
    ("task3_ddp", "--world_size 2", "--local_rank: .* it was not given"),
    ("task3_ddp", "--world_size 0", "--world_size: .* got 0"),
    ("task3_ddp", "--master_port 80", "--master_port: expected 1024 to 65535 .*, got 80"),
    ("task3_ddp", "--backend nccl", "--backend nccl needs an NVIDIA GPU"),
    ("task3_ddp gpt2", "--timeline --profile", "--profile and --timeline both use torch's profiler; choose one"),
    ("task3_ddp gpt2", "--batch_size 10 --world_size 4 --local_rank 0", "10 is not divisible by 4 .*example 8"),
    ("task2b_allreduce gpt2", "--batch_size 2 --world_size 4", "2 is not divisible by 4 .*, for example 4"),
    ("task2b_allreduce gpt2", "--local_rank 1", r"starts its workers itself.*task3_ddp/run_gpt2\.py"),
    ("pipeline gpt2", "--schedule 1f1b --model_parallel_mode model_parallel", "do not pass --model_parallel_mode"),
    ("pipeline gpt2", "--n_chunk 0", "--n_chunk: expected 1 or more"),
    ("beyond", "--grid data=2", "--grid works only with --strategy grid, got ring"),
    ("beyond", "--strategy grid --world_size 3 --local_rank 0", "expected a grid for 3 .*, for instance tensor=3"),
    ("beyond", "--strategy grid --grid data=2,tensor=2", "data=2,tensor=2 needs 4 workers, got 1"),
    *[("beyond", f"--strategy grid --grid {grid}", "expected axes and sizes such as pipeline=2")
      for grid in ("rows=2", "data=2,data=2", "data=0", "data")],
    ("beyond", "--strategy tensor --world_size 3 --local_rank 0 --batch_size 3", "a tensor axis that divides the 4"),
    ("beyond", "--strategy 1f1b --world_size 64 --local_rank 0", "at most 4 stages, one for each block; got 64"),
    ("beyond", "--strategy 1f1b --world_size 2 --local_rank 0 --n_chunk 3", "not divisible by 3 .micro-batches"),
    ("beyond", "--strategy tensor --save_to x", "--save_to: expected a strategy with shards"),
    *[("beyond", f"--strategy overlap --bucket_mb {size}", "--bucket_mb: expected a size in MiB, above 0")
      for size in ("0", "-1", "nan", "1e9")],
])  # fmt: skip
def test_a_wrong_value_is_one_line_with_flag_and_expectation(script, flags, words):
    with pytest.raises(InputError, match=words) as error:
        parse(script, flags)

    assert "\n" not in str(error.value)


def test_only_the_first_worker_looks_whether_the_output_folder_is_empty(tmp_path):
    Path(tmp_path / "mine").touch()

    flags = f"--output_dir {tmp_path} --world_size 2 --local_rank"
    assert parse("task3_ddp", f"{flags} 1").output_dir == tmp_path
    assert parse("task3_ddp", f"{flags} 0 --overwrite_output_dir").overwrite_output_dir
    with pytest.raises(InputError, match="not empty"):
        parse("task3_ddp", f"{flags} 0")


@pytest.mark.parametrize(("script", "flag"), [
    ("task2b_allreduce gpt2", "--n_chunk 3"), ("task3_ddp gpt2", "--pytest True"), ("beyond", "--check_gradients"),
    ("hello", "--task_name rte"), ("task1_single", "--grad_dtype bf16"), ("task1_single", "--num_train_epochs 2.5"),
])  # fmt: skip
def test_a_flag_that_would_do_nothing_is_not_there(script, flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(script, flag)

    assert re.fullmatch(rf"error: .*{flag.split()[0]}.* \(--help lists the flags\)\n", capsys.readouterr().err)
