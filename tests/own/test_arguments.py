"""The command line: defaults that run, names that are kept, and mistakes that are said in one line."""

from dataclasses import FrozenInstanceError

import pytest

from common.arguments import parse_glue_arguments, parse_gpt2_arguments
from common.errors import InputError
from common.paths import ROOT
from tests.own.warm import Script


def glue(*flags):
    return parse_glue_arguments("task1_single", [str(flag) for flag in flags])


def test_no_argument_at_all_means_the_sample_and_the_tiny_model():
    config = glue()

    assert config.data_dir is None
    assert "tiny-bert" in config.model_name_or_path
    assert (config.do_train, config.do_eval) == (True, True)
    assert (config.rank, config.world_size) == (0, 1)


def test_on_the_cpu_the_backend_is_gloo():
    assert glue("--no_cuda").backend == "gloo"


def test_local_rank_carries_the_rank_among_all_workers():
    assert glue("--world_size", 4, "--local_rank", 3).rank == 3


def test_the_default_batch_of_one_worker_is_its_share_of_64():
    assert glue("--world_size", 4, "--local_rank", 0).per_gpu_train_batch_size == 16


def test_only_do_train_switches_evaluation_off():
    config = glue("--do_train")

    assert (config.do_train, config.do_eval) == (True, False)


def test_torchrun_environment_replaces_the_flags(monkeypatch):
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.10.1.1", "MASTER_PORT": "7000"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)

    config = glue()

    assert (config.rank, config.world_size, config.rank_on_node) == (5, 8, 1)
    assert (config.master_ip, config.master_port) == ("10.10.1.1", 7000)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        glue().seed = 1


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--per_gpu_train_batch_size", 0], ["--per_gpu_train_batch_size", "1 or more", "0"]),
        (["--num_train_epochs", -1], ["--num_train_epochs", "-1"]),
        (["--learning_rate", 0], ["--learning_rate", "above 0"]),
        (["--learning_rate", "nan"], ["--learning_rate", "nan"]),
        (["--dropout", 1], ["--dropout", "below 1"]),
        (["--task_name", "RTX"], ["--task_name", "rte", "rtx"]),
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


def test_epochs_may_be_written_as_in_the_course_with_a_point():
    assert glue("--num_train_epochs", "3.0").num_train_epochs == 3


def test_true_and_false_are_words():
    assert parse_gpt2_arguments("task2b_allreduce", ["--pytest", "False"]).pytest is False
    assert parse_gpt2_arguments("task2b_allreduce", ["--pytest", "True"]).pytest is True


@pytest.mark.parametrize(
    ("task", "flags"),
    [
        ("task2b_allreduce", ["--schedule", "gpipe"]),
        ("task2b_allreduce", ["--n_chunk", "3"]),
        ("task3_ddp", ["--pytest", "True"]),
        ("task3_ddp", ["--model_parallel_mode", "none"]),
        ("pipeline", ["--pytest", "True"]),
    ],
)
def test_a_flag_that_would_do_nothing_is_not_there(task, flags, capsys):
    with pytest.raises(SystemExit):
        parse_gpt2_arguments(task, flags)

    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_mode_that_contradicts_the_schedule_is_refused(schedule):
    with pytest.raises(InputError, match="model_parallel"):
        parse_gpt2_arguments("pipeline", ["--schedule", schedule, "--model_parallel_mode", "model_parallel"])


@pytest.mark.parametrize(("flags", "variable"), [(["--local_rank", "1"], None), ([], "RANK")])
def test_a_script_that_starts_its_own_workers_is_not_one_of_them(flags, variable, monkeypatch):
    if variable:
        monkeypatch.setenv(variable, "0")

    with pytest.raises(InputError, match=r"starts its workers itself.*task3_ddp/run_gpt2\.py"):
        parse_gpt2_arguments("task2b_allreduce", flags, world_size=2)


def test_a_total_batch_that_does_not_divide_names_one_that_does():
    with pytest.raises(InputError, match=r"50 is not divisible by 4 \(workers\); use a multiple of 4, for example 48"):
        parse_gpt2_arguments("task2b_allreduce", ["--batch_size", "50", "--world_size", "4"], world_size=2)


def test_a_script_that_starts_its_own_workers_has_the_courses_port(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)

    config = parse_gpt2_arguments("task2b_allreduce", [], world_size=2)

    assert (config.world_size, config.rank, config.master_port) == (2, 0, 11868)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--no_such_flag"], marks=pytest.mark.proof),
        pytest.param(["--seed", "x"], marks=pytest.mark.proof),
        pytest.param(["--task_name", "nothing"], marks=pytest.mark.medium),
    ],
)
def test_the_script_ends_with_one_line_and_code_2(flags, tmp_path):
    log = tmp_path / "log"

    code = Script(ROOT / "task1_single" / "run_glue.py", flags, log).wait(timeout=60)

    assert code == 2
    assert log.read_text().startswith("error: ")
    assert log.read_text().count("\n") == 1


@pytest.mark.parametrize(("words", "steps"), [([], 0), (["--timeline"], 3), (["--timeline", "20"], 20)])
def test_timeline_shows_three_steps_or_as_many_as_it_names(words, steps):
    assert parse_gpt2_arguments("task3_ddp", words).timeline == steps


def test_timeline_and_profile_exclude_each_other():
    with pytest.raises(InputError, match="--profile and --timeline both use torch's profiler; choose one"):
        parse_gpt2_arguments("task3_ddp", ["--timeline", "--profile"])
