"""submit.py's reading of records: what is damaged, missing or of another run is named and left out, never guessed."""

import json
import math

import pytest

from handin.choice import choose, missing_runs
from handin.measures import compare_losses, not_comparable
from handin.runs import differences, find_runs
from tests.own.run_records import change, make_record, write_run

TASK = "task2b_allreduce"


@pytest.fixture
def runs(tmp_path):
    """A folder with one good run on three workers."""
    write_run(tmp_path / "runs" / TASK, TASK, 3)
    return tmp_path / "runs"


def read_one(runs):
    found, unusable = find_runs(runs.parent, runs)
    assert not unusable
    (run,) = found
    return run


def test_a_whole_run_is_read_without_a_doubt(runs):
    run = read_one(runs)

    assert (run.name, run.slot, run.workers, run.problems) == (f"runs/{TASK}", "task2b", 3, ())
    assert [record["rank"] for record in run.records] == [0, 1, 2]


def test_losses_are_the_mean_over_the_workers(runs):
    for rank, loss in enumerate((1.0, 2.0, 6.0)):
        record = make_record(TASK, rank, 3, steps=2, losses=[loss, 0.5])
        (runs / TASK / f"rank{rank}.json").write_text(json.dumps(record))

    assert read_one(runs).mean_losses == [3.0, 0.5]


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"task": "task2b_allr', "rank1.json is incomplete or damaged"),
        ("", "rank1.json is incomplete or damaged"),
        ("[" * 100_000, "rank1.json is incomplete or damaged"),
        ("[1]", "rank1.json has no usable content"),
    ],
)
def test_a_half_written_record_is_named_and_left_out(runs, content, said):
    (runs / TASK / "rank1.json").write_text(content)

    run = read_one(runs)

    assert [record["rank"] for record in run.records] == [0, 2]
    assert said in run.problems[0]
    assert "rank1.json is missing (the run had 3 workers)" in run.problems[1]


@pytest.mark.parametrize("key", ["versions", "iterations", "collectives", "steps_per_epoch", "world_size"])
def test_a_record_of_another_version_of_the_scripts_is_named(runs, key):
    record = make_record(TASK, 1, 3)
    del record[key]
    (runs / TASK / "rank1.json").write_text(json.dumps(record))

    assert f"rank1.json has no usable {key}: written by another version" in read_one(runs).problems[0]


@pytest.mark.parametrize("step", [{}, {"loss": 1.0}, {"loss": 1.0, "seconds": -1}, {"loss": 1, "seconds": math.nan}, 7])
def test_iterations_without_a_time_are_named(runs, step):
    change(runs / TASK / "rank1.json", iterations=[step])

    assert "rank1.json has no usable iterations[0]" in read_one(runs).problems[0]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"config": {"seed": 7}}, "seed 7 vs. 42"),
        ({"config": {"per_gpu_train_batch_size": 5}}, "per_gpu_train_batch_size 5 vs. 21"),
        ({"versions": {"torch": "2.9.0"}}, "versions"),
        ({"world_size": 4}, "world_size 4 vs. 3"),
    ],
)
def test_a_rank_of_another_run_is_named_and_left_out(runs, changes, said):
    change(runs / TASK / "rank2.json", **changes)

    run = read_one(runs)

    assert [record["rank"] for record in run.records] == [0, 1]
    assert "rank2.json is from a different run" in run.problems[0]
    assert said in run.problems[0]


def test_a_rank_that_stopped_early_is_named(runs):
    record = make_record(TASK, 2, 3, steps=7)
    (runs / TASK / "rank2.json").write_text(json.dumps(record))
    (runs / TASK / "loss_2.txt").write_text("0.1\n" * 7)

    assert read_one(runs).problems == ("rank 2 has 7 iterations, rank 0 has 40",)


def test_a_loss_file_of_another_run_is_named(runs):
    (runs / TASK / "loss_0.txt").write_text("0.1\n0.2\n")

    assert read_one(runs).problems == (
        "loss_0.txt and rank0.json have different numbers of losses: they are from two runs",
    )  # fmt: skip


def test_a_loss_that_is_no_number_is_named(runs):
    losses = [0.7] * 40
    losses[6] = math.nan
    (runs / TASK / "rank0.json").write_text(json.dumps(make_record(TASK, 0, 3, losses=losses)))

    assert read_one(runs).problems == ("the loss of rank 0 at iteration 7 is not a number",)


def test_a_renamed_record_is_named(runs):
    (runs / TASK / "rank2.json").rename(runs / TASK / "rank5.json")

    assert "rank5.json says it is rank 2 of 3" in read_one(runs).problems[0]


def test_a_folder_without_a_record_is_named(tmp_path):
    (tmp_path / "runs" / TASK).mkdir(parents=True)

    found, unusable = find_runs(tmp_path, tmp_path / "runs")

    assert found == []
    assert unusable == [f"runs/{TASK}: no record in it (the run was interrupted or is still running)"]


@pytest.mark.parametrize("name", ["demo", "pictures"])
def test_runs_of_the_courses_own_commands_are_not_the_students(runs, name):
    write_run(runs / name / "task3_ddp", "task3_ddp", 4)

    assert read_one(runs).slot == "task2b"
    assert [run.name for run in find_runs(runs.parent, runs / name)[0]] == [f"runs/{name}/task3_ddp"]


def test_runs_with_different_schedules_are_not_expected_to_have_equal_losses(runs):
    write_run(runs / "task3_ddp", "task3_ddp", 3, num_train_epochs=8)
    one, other = find_runs(runs.parent, runs)[0]

    (doubt,) = compare_losses([one, other])

    assert doubt.endswith("are not comparable: steps of the schedule 40 vs. 104")
    assert not not_comparable(one, other)  # the times are


def test_no_runs_at_all_are_no_error(tmp_path):
    assert find_runs(tmp_path, tmp_path / "runs") == ([], [])


def test_glue_and_gpt2_runs_of_one_task_are_told_apart(runs):
    write_run(runs / "task2b_allreduce_gpt2", TASK, 2, n_epochs=2, batch_size=128, model_max_length=64)

    assert {run.slot for run in find_runs(runs.parent, runs)[0]} == {"task2b", "task2b_gpt2"}


def test_what_two_runs_do_not_share_is_listed(runs):
    write_run(runs / "other", TASK, 3, seed=7, per_gpu_train_batch_size=8)
    one, other = find_runs(runs.parent, runs)[0]

    assert differences(one, other) == ["seed 7 vs. 42", "total batch 24 vs. 63"]


def test_a_whole_run_is_preferred_to_a_damaged_one_in_the_default_folder(runs):
    write_run(runs / "again", TASK, 3)
    (runs / TASK / "rank1.json").unlink()

    chosen = choose(find_runs(runs.parent, runs)[0])

    assert [run.name for run in chosen.timed] == ["runs/again"]


def test_task_1_with_most_epochs_gives_the_metrics_and_the_comparable_one_the_times(runs):
    write_run(runs / "task1_single", "task1_single", steps=40)
    write_run(runs / "long", "task1_single", steps=39, per_epoch=13, seed=3)
    write_run(runs / "task1_single", "task1_single", steps=40, per_epoch=39)

    chosen = choose(find_runs(runs.parent, runs)[0])

    assert chosen.metrics.name == "runs/long"
    assert chosen.one.name == "runs/task1_single"


def test_the_command_for_a_missing_run_makes_it_like_those_that_are_there(tmp_path):
    write_run(tmp_path / "runs/task1_single", "task1_single", seed=3, data_dir=str(tmp_path / "glue/RTE"), dropout=None)

    missing = dict(missing_runs(choose(find_runs(tmp_path, tmp_path / "runs")[0]), tmp_path))

    assert missing["40 iterations of task3"] == (
        "python -m cluster.launch --workers 4 -- task3_ddp/run_glue.py --max_steps 40 --data_dir glue/RTE "
        "--task_name rte --max_seq_length 32 --learning_rate 0.001 --seed 3"
    )


def test_where_nothing_was_run_the_commands_make_losses_that_are_the_same(tmp_path):
    missing = dict(missing_runs(choose([]), tmp_path))

    assert missing["40 iterations of task2a"].endswith("task2a_gather_scatter/run_glue.py --max_steps 40 --dropout 0")
    assert missing["task 1 over 3 epochs"] == "python task1_single/run_glue.py --dropout 0"


def test_epochs_that_are_missing_get_a_folder_of_their_own(tmp_path):
    write_run(tmp_path / "runs/task1_single", "task1_single", steps=40, per_epoch=39)

    what, command = missing_runs(choose(find_runs(tmp_path, tmp_path / "runs")[0]), tmp_path)[0]

    assert what == "task 1 over 3 epochs (runs/task1_single has only 1 of them)"
    epochs = "--num_train_epochs 3"  # as in the run that is there: the schedule depends on it
    assert command == f"python task1_single/run_glue.py {epochs} --dropout 0 --output_dir runs/task1_epochs"


def test_a_run_of_one_worker_is_not_in_the_table_of_scalability(runs):
    write_run(runs / "alone", TASK, 1)

    chosen = choose(find_runs(runs.parent, runs)[0])

    assert [run.workers for run in chosen.scaled] == [3]
