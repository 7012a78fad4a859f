"""submit.py's reading of records: what is damaged, missing or of another run is named and left out, never guessed."""

import json
import math

import pytest

from handin.measures import choose, compare_losses, missing_runs, not_comparable
from handin.runs import differences, find_runs
from tests.own.run_records import change, make_record, read_report, write_run

TASK = "task2b_allreduce"


@pytest.fixture
def runs(tmp_path):
    """A folder with one good run on three workers."""
    write_run(tmp_path / "runs" / TASK, TASK, 3)
    return tmp_path / "runs"


def read_one(runs):
    usable, unusable = find_runs(runs.parent, runs)
    assert not unusable
    (run,) = usable
    return run


def test_a_whole_run_is_read_without_a_doubt_and_its_losses_are_the_mean_over_the_workers(runs):
    for rank, loss in enumerate((1.0, 2.0, 6.0)):
        record = make_record(TASK, rank, 3, steps=2, losses=[loss, 0.5])
        (runs / TASK / f"rank{rank}.json").write_text(json.dumps(record))
        (runs / TASK / f"loss_{rank}.txt").write_text("1\n2\n")

    run = read_one(runs)

    assert (run.name, run.slot, run.workers, run.problems) == (f"runs/{TASK}", "task2b", 3, ())
    assert [record["rank"] for record in run.records] == [0, 1, 2]
    assert run.mean_losses == [3.0, 0.5]


def text(content):
    return lambda path: path.write_text(content)


def without(key):
    """Take a key away, as from a record of another version of the scripts."""
    return lambda path: path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))


def changed(**changes):
    return lambda path: change(path, **changes)


@pytest.mark.parametrize(
    "damage, problem",
    [
        (text('{"task": "task2b_allr'), "rank1.json is incomplete or damaged"),
        (text("[" * 100_000), "rank1.json is incomplete or damaged"),
        (text("[1]"), "rank1.json has no usable content"),
        (without("versions"), "rank1.json has no usable versions: written by another version"),
        (without("world_size"), "rank1.json has no usable world_size"),
        (changed(iterations=[{"loss": 1.0}]), "rank1.json has no usable iterations[0]"),
        (changed(iterations=[{"loss": 1.0, "seconds": -1}]), "rank1.json has no usable iterations[0]"),
        (changed(iterations=[{"loss": 1, "seconds": math.nan}]), "rank1.json has no usable iterations[0]"),
        (changed(config={"seed": 7}), "different run than task2b_allreduce's first record (seed 7 vs. 42)"),
        (changed(versions={"torch": "2.9.0"}), "rank1.json is from a different run"),
        (changed(world_size=4), "(world_size 4 vs. 3)"),
        (lambda path: path.rename(path.with_name("rank5.json")), "rank5.json says it is rank 1 of 3"),
    ],
)
def test_a_record_that_is_damaged_or_of_another_run_is_named_and_left_out(runs, damage, problem):
    damage(runs / TASK / "rank1.json")

    run = read_one(runs)

    assert [record["rank"] for record in run.records] == [0, 2]
    assert problem in run.problems[0]
    assert "rank1.json is missing (the run had 3 workers)" in run.problems[1]


@pytest.mark.parametrize(
    "name, damage, problem",
    [
        ("rank2.json", changed(iterations=[{"loss": 0.1, "seconds": 1}] * 7), "rank 2 has 7 iterations, rank 0 has 40"),
        (
            "rank0.json",
            changed(iterations=[{"loss": 0.7 if i != 6 else math.nan, "seconds": 1} for i in range(40)]),
            "the loss of rank 0 at iteration 7 is not a number",
        ),
    ],
)
def test_a_record_that_contradicts_the_others_is_a_doubt(runs, name, damage, problem):
    damage(runs / TASK / name)

    assert problem in read_one(runs).problems[0]


def test_a_folder_without_a_record_is_named_and_no_folder_is_no_error(tmp_path):
    assert find_runs(tmp_path, tmp_path / "runs") == ([], [])
    (tmp_path / "runs" / TASK).mkdir(parents=True)

    usable, unusable = find_runs(tmp_path, tmp_path / "runs")

    assert usable == []
    assert unusable == [f"runs/{TASK}: no record in it (the run was interrupted or is still running)"]


def places(value, path=()):
    """The path of everything in a record, containers included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@pytest.mark.medium
@pytest.mark.parametrize("odd", [None, "x", -1, 0, [], {}, float("inf"), [{}], True])
def test_whatever_stands_in_a_record_the_report_is_written(tmp_path, odd):
    folder = write_run(tmp_path / "runs/task1_single", "task1_single", steps=2, per_epoch=1)
    write_run(tmp_path / "runs/task3_ddp", "task3_ddp", 2, steps=2, per_epoch=1)
    good = (folder / "rank0.json").read_text()
    for place in places(json.loads(good)):
        record = json.loads(good)
        inner = record
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = odd
        (folder / "rank0.json").write_text(json.dumps(record))

        assert "## Scalability" in read_report(tmp_path)[0], place


def test_what_two_runs_do_not_share_is_listed(runs):
    write_run(runs / "other", TASK, 3, seed=7, per_gpu_train_batch_size=8, max_seq_length=64)
    for rank in range(3):
        change(runs / f"other/rank{rank}.json", versions={"torch": "2.9.0"})
    one, other = find_runs(runs.parent, runs)[0]

    all_differences = differences(one, other)
    assert all_differences == [
        "seed 7 vs. 42", "total batch 24 vs. 63", "tokens per example 64 vs. 32", "torch 2.9.0 vs. 2.13.0+cpu",
    ]  # fmt: skip
    assert differences(one, other, but=("seed",)) == all_differences[1:]


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


def test_a_whole_run_is_preferred_to_a_damaged_one_in_the_default_folder(runs):
    write_run(runs / "again", TASK, 3)
    write_run(runs / "alone", TASK, 1)  # no speed-up, so it is not in the table of scalability
    write_run(runs / "task2b_allreduce_gpt2", TASK, 2, n_epochs=2, batch_size=128, model_max_length=64)
    (runs / TASK / "rank1.json").unlink()

    chosen = choose(find_runs(runs.parent, runs)[0])

    assert [run.name for run in chosen.timed] == ["runs/again"]
    assert {run.name for run in chosen.scaled} == {"runs/again", f"runs/{TASK}"}


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
    missing = dict(missing_runs(choose([]), tmp_path))  # where nothing was run, losses are to be the same
    assert missing["40 iterations of task2a"].endswith("task2a_gather_scatter/run_glue.py --max_steps 40 --dropout 0")


def test_epochs_that_are_missing_get_a_folder_of_their_own(tmp_path):
    write_run(tmp_path / "runs/task1_single", "task1_single", steps=40, per_epoch=39)

    what, command = missing_runs(choose(find_runs(tmp_path, tmp_path / "runs")[0]), tmp_path)[0]

    assert what == "task 1 over 3 epochs (runs/task1_single has only 1 of them)"
    epochs = "--num_train_epochs 3"  # as in the run that is there: the schedule depends on it
    assert command == f"python task1_single/run_glue.py {epochs} --dropout 0 --output_dir runs/task1_epochs"
