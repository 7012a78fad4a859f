"""What becomes of an earlier run: no record is lost to a run that does not complete, or to a quick try that does."""

import json
import re
from dataclasses import replace

import pytest

from common.arguments import parse_glue_arguments, parse_traffic_arguments
from common.paths import ROOT
from common.record import Record
from common.workers import run_files
from common.workers.process_group import Worker
from common.workers.run_files import files_of_a_run, settle
from handin.measures import choose
from handin.runs import find_runs
from task4_traffic.traffic import TrafficRecord
from tests.own.run_records import write_run

TASK = "task1_single"
PIPELINE = {"batch_size": 32, "model_max_length": 64, "n_epochs": 2, "schedule": "threads"}


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begins a new run in this folder of runs/. Without `finish`, it is one that crashes or is killed."""
    monkeypatch.setattr(run_files, "ROOT", tmp_path)
    config = parse_glue_arguments(TASK, ["--output_dir", str(tmp_path / "elsewhere")])

    def begin_in(folder):
        return Record(replace(config, output_dir=folder), Worker())

    return begin_in


def finish(folder, task=TASK, world_size=1, **options):
    """The rest of a run: every rank writes its files."""
    write_run(folder, task, world_size, **options)
    for rank in range(world_size):
        settle(folder, rank, world_size)


def names(tmp_path):
    return [run.name for run in find_runs(tmp_path, tmp_path / "runs")[0]]


def length(folder):
    return len(json.loads((folder / "rank0.json").read_text())["iterations"])


def test_the_longest_earlier_run_is_kept(tmp_path, begin, capsys):
    folder, kept = tmp_path / "runs" / TASK, tmp_path / "runs" / f"{TASK}.kept"
    for steps, workers in ((40, 4), (3, 1), (50, 1), (10, 1)):
        begin(folder)
        finish(folder, steps=steps, world_size=workers)
    assert sorted(file.name for file in kept.glob("rank*")) == ["rank0.json"]  # and no file of another run

    assert (length(kept), length(folder)) == (50, 10)
    assert not (folder / "earlier").exists()
    assert capsys.readouterr().out.count("is kept in") == 2
    (folder / "rank0.json").write_text("{")  # what is damaged is not kept
    begin(folder)
    assert not (folder / "earlier").exists() and length(kept) == 50
    # The report uses it where the newest run is too short.
    begin(folder)
    finish(folder, steps=2)
    assert choose(find_runs(tmp_path, tmp_path / "runs")[0]).one.name == f"runs/{TASK}.kept"


def test_a_run_that_crashes_takes_no_record_away_however_often(tmp_path, begin):
    folder = tmp_path / "runs/pipeline"
    for mode in ("model_parallel", "pipeline_parallel"):  # both of the same length
        begin(folder)
        finish(folder, "pipeline", model_parallel_mode=mode, n_chunk=4, **PIPELINE)

    for _ in range(3):
        begin(folder)
        (folder / "trace.json").write_text("of a run that crashes now")

    usable, unusable = find_runs(tmp_path, tmp_path / "runs")
    assert {run.name: run.first["config"]["model_parallel_mode"] for run in usable} == {
        "runs/pipeline/earlier": "pipeline_parallel",
        "runs/pipeline.kept": "model_parallel",
    }
    assert unusable == [
        "runs/pipeline: no record in it (the run was interrupted or is still running); "
        "the report uses the run before it, runs/pipeline/earlier"
    ]


def test_a_rank_that_dies_at_the_end_leaves_the_complete_earlier_run(tmp_path, begin):
    folder = tmp_path / "runs" / TASK
    finish(folder, world_size=2, steps=9)

    for _ in range(2):
        begin(folder)
        write_run(folder, TASK, 2, steps=30)
        (folder / "rank1.json").unlink()
        settle(folder, 0, 2)

    assert length(folder / "earlier") == 9
    assert f"runs/{TASK}/earlier" in names(tmp_path)


def test_a_complete_run_is_not_given_up_for_a_longer_one_with_missing_ranks(tmp_path, begin):
    folder = tmp_path / "runs" / TASK
    finish(folder, world_size=2, steps=5)
    begin(folder)
    finish(folder, world_size=2, steps=3)
    assert length(folder.with_name(f"{TASK}.kept")) == 5

    begin(folder)
    write_run(folder, TASK, 2, steps=30)
    (folder / "rank1.json").unlink()
    begin(folder)

    assert length(folder.with_name(f"{TASK}.kept")) == 5
    assert length(folder / "earlier") == 3


def test_where_each_machine_has_its_own_folder_the_newest_record_counts(tmp_path, begin):
    folder = tmp_path / "runs" / TASK
    for steps in (40, 50, 50):
        begin(folder)
        write_run(folder, TASK, 4, steps=steps)
        for rank in (1, 2, 3):
            (folder / f"rank{rank}.json").unlink()
        settle(folder, 0, 4)

    assert length(folder / "earlier") == 50  # the next run, or the copies of the other ranks, decide
    assert names(tmp_path) == [f"runs/{TASK}", f"runs/{TASK}.kept"]


def test_a_run_outside_of_runs_is_replaced_only_by_a_complete_one(tmp_path, begin):
    folder = tmp_path / "mine"
    write_run(folder, TASK, 1, steps=5)

    begin(folder)
    assert length(folder / "earlier") == 5

    finish(folder, steps=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
    assert not (folder / "earlier").exists()


def test_the_run_that_writes_its_record_settles(tmp_path, begin):
    folder = tmp_path / "runs" / TASK
    write_run(folder, TASK, 1, steps=5)

    begin(folder).write()

    assert length(folder) == 0
    assert json.loads((folder / "rank0.json").read_text())["timeline"] is None
    assert not (folder / "earlier").exists()
    assert length(folder.with_name(f"{TASK}.kept")) == 5


def test_all_files_of_a_run_are_moved_and_no_other_file(tmp_path, begin):
    folder = tmp_path / "runs/task4_traffic"
    write_run(folder, "task4_traffic", 2, steps=5)
    written = ["traffic_0.json", "counters_1.csv", "timeline.html", "trace.png", "trace_0.json"]
    for name in [*written, "notes.txt"]:
        (folder / name).write_text("x")

    begin(folder)

    assert set(written) < {file.name for file in (folder / "earlier").iterdir()}
    assert sorted(file.name for file in folder.iterdir()) == ["earlier", "notes.txt"]


def test_every_file_that_a_script_writes_into_its_folder_belongs_to_the_run(tmp_path):
    """A file that is not listed would stay behind, beside those of the next run."""
    folders = ("common", "task*", "pipeline", "beyond")
    texts = [source.read_text() for folder in folders for source in ROOT.glob(f"{folder}/**/*.py")]
    templates = [name for text in texts for name in re.findall(r'output_dir / f?"([^"]+)"', text)]
    for writer in ("record.py", "step_profiler.py", "timeline/run_timeline.py"):  # these call it `folder`
        templates += re.findall(r'folder / f?"([^"]+)"', (ROOT / "common" / writer).read_text())
    file_names = {re.sub(r"{[^}]*}", "0", name) for name in templates}
    for name in file_names:
        (tmp_path / name).touch()

    assert {"rank0.json", "traffic_0.json", "counters_0.csv", "trace.png", "trace_0.json", "timeline.png"} <= file_names
    assert {file.name for file in files_of_a_run(tmp_path)} == file_names


def test_the_counters_of_an_earlier_run_stay_as_they_are_while_another_rank_begins(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--overwrite_output_dir", "--interface", "lo"]
    config = parse_traffic_arguments("task4_traffic", [*flags, "--world_size", "2", "--local_rank", "1"])
    (tmp_path / "counters_1.csv").write_text("of an earlier run\n")

    record = TrafficRecord(config, Worker(1, 2))
    record._counter.stop()

    assert (tmp_path / "counters_1.csv").read_text() == "of an earlier run\n"
