"""The command line: defaults that run, names that are kept, and mistakes that are said in one line."""

import pytest

from common.arguments import parse_glue_arguments, parse_gpt2_arguments
from common.errors import InputError
from common.paths import ROOT


def glue(*flags):
    return parse_glue_arguments("task1_single", [str(flag) for flag in flags])


def test_no_argument_at_all_means_the_sample_and_the_tiny_model():
    config = glue()

    assert config.data_dir is None
    assert "tiny-bert" in config.model_name_or_path
    assert (config.do_train, config.do_eval) == (True, True)
    assert (config.rank, config.world_size) == (0, 1)
    assert (config.per_gpu_train_batch_size, config.timeline) == (64, 0)


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--world_size", 4, "--local_rank", 3], {"rank": 3, "per_gpu_train_batch_size": 16}),  # its share of 64
        (["--do_train"], {"do_train": True, "do_eval": False}),
        (["--num_train_epochs", "3.0"], {"num_train_epochs": 3}),  # as the course writes it
        (["--timeline"], {"timeline": 3}),
        (["--timeline", 20], {"timeline": 20}),
    ],
)
def test_a_flag_changes_what_it_names(flags, expected):
    config = glue(*flags)

    assert {name: getattr(config, name) for name in expected} == expected


def test_torchrun_environment_replaces_the_flags(monkeypatch):
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.10.1.1", "MASTER_PORT": "7000"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)

    config = glue()

    assert (config.rank, config.world_size, config.rank_on_node) == (5, 8, 1)
    assert (config.master_ip, config.master_port) == ("10.10.1.1", 7000)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--per_gpu_train_batch_size", 0], ["--per_gpu_train_batch_size", "1 or more", "0"]),
        (["--learning_rate", 0], ["--learning_rate", "above 0"]),
        (["--learning_rate", "nan"], ["--learning_rate", "nan"]),
        (["--dropout", 1], ["--dropout", "below 1"]),
        (["--task_name", "RTX"], ["--task_name", "rte", "rtx"]),
        (["--task_name", "SST-2"], ["sst-2", "the embedded sample has RTE alone", "--data_dir"]),
        (["--world_size", 2, "--local_rank", 2], ["--local_rank", "0 to 1", "2"]),
        (["--world_size", 2], ["--local_rank", "not given"]),
        (["--world_size", 0], ["--world_size", "0"]),
        (["--master_port", 80], ["--master_port", "1024", "80"]),
        (["--master_port", 65536], ["--master_port", "65535", "65536"]),
        (["--data_dir", "nowhere"], ["--data_dir", "nowhere"]),
        (["--model_name_or_path", "common"], ["--model_name_or_path", "common", "config.json"]),
        (["--output_dir", "common"], ["--output_dir", "not empty", "--overwrite_output_dir"]),
    ],
)
def test_a_wrong_value_is_one_line_with_flag_and_expectation(flags, words, monkeypatch):
    monkeypatch.chdir(ROOT)

    with pytest.raises(InputError) as error:
        glue(*flags)

    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_only_the_first_worker_looks_whether_the_output_folder_is_empty(tmp_path):
    (tmp_path / "kept").write_text("mine")

    config = glue("--output_dir", tmp_path, "--world_size", 2, "--local_rank", 1)

    assert config.output_dir == tmp_path


@pytest.mark.parametrize(
    "task, flags, world_size, message",
    [
        ("pipeline", "--schedule gpipe --model_parallel_mode model_parallel", 1, "do not pass --model_parallel_mode"),
        ("pipeline", "--schedule 1f1b --model_parallel_mode model_parallel", 1, "do not pass --model_parallel_mode"),
        ("task2b_allreduce", "--local_rank 1", 2, r"starts its workers itself.*task3_ddp/run_gpt2\.py"),
        ("task2b_allreduce", "--batch_size 50 --world_size 4", 2, r"50 is not divisible by 4 .*, for example 48"),
        ("task3_ddp", "--timeline --profile", 1, "--profile and --timeline both use torch's profiler; choose one"),
    ],
)
def test_flags_of_gpt2_that_contradict_each_other_are_refused(task, flags, world_size, message):
    with pytest.raises(InputError, match=message):
        parse_gpt2_arguments(task, flags.split(), world_size=world_size)


def test_a_script_that_starts_its_own_workers_has_the_courses_port_and_is_not_started_by_torchrun(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for words, is_test in (([], False), (["--pytest", "True"], True), (["--pytest", "False"], False)):
        config = parse_gpt2_arguments("task2b_allreduce", words, world_size=2)
        assert (config.world_size, config.rank, config.master_port, config.pytest) == (2, 0, 11868, is_test)

    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="starts its workers itself"):
        parse_gpt2_arguments("task2b_allreduce", [], world_size=2)


@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("task2b_allreduce", ["--n_chunk", "3"]),
        ("task3_ddp", ["--pytest", "True"]),
        ("pipeline", ["--pytest", "True"]),
    ],
)
def test_a_flag_that_would_do_nothing_is_not_there(task, flags, capsys):
    with pytest.raises(SystemExit):
        parse_gpt2_arguments(task, flags)

    assert flags[0] in capsys.readouterr().err
