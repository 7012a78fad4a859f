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


def run(begin, folder, steps, workers=1, ranks=None, task=TASK, **options):
    """A run from its beginning, of which these ranks (all) end and write their records."""
    begin(folder)
    write_run(folder, task, workers, steps=steps, **options)
    ranks = range(workers) if ranks is None else ranks
    for rank in set(range(workers)) - set(ranks):
        (folder / f"rank{rank}.json").unlink()
    for rank in ranks:
        settle(folder, rank, workers)


def length(folder):
    record = folder / "rank0.json"
    return len(json.loads(record.read_text())["iterations"]) if record.exists() else None


@pytest.mark.parametrize(
    "folder, runs, newest, earlier, kept",
    [
        (f"runs/{TASK}", [(40, 4), (3, 1), (50, 1), (10, 1)], 10, None, 50),  # the longest
        (f"runs/{TASK}", [(9, 1), (5, 1, ()), (6, 1, ())], None, 9, None),  # two that crash
        (f"runs/{TASK}", [(9, 2), (30, 2, (0,)), (30, 2, (0,))], 30, 9, 30),  # rank 1 dies at the end
        (f"runs/{TASK}", [(5, 2), (3, 2), (30, 2, (0,)), (7, 1, ())], None, 3, 5),
        (f"runs/{TASK}", [(40, 4, (0,)), (50, 4, (0,)), (51, 4, (0,))], 51, 50, 40),  # the other ranks are elsewhere
        ("mine", [(5, 1), (7, 1, ())], None, 5, None),  # outside of runs/, only a complete run replaces one
        ("mine", [(5, 1), (3, 1)], 3, None, None),
    ],
)
def test_no_complete_run_is_lost_to_one_that_is_not_or_to_a_quick_try(
    tmp_path, begin, folder, runs, newest, earlier, kept
):
    folder = tmp_path / folder
    for steps, *more in runs:
        run(begin, folder, steps, *more)

    assert (length(folder), length(folder / "earlier")) == (newest, earlier)
    assert length(folder.with_name(f"{folder.name}.kept")) == kept


def test_the_run_that_is_kept_is_whole_and_the_report_uses_it_where_the_newest_is_too_short(tmp_path, begin, capsys):
    folder, kept = tmp_path / "runs" / TASK, tmp_path / "runs" / f"{TASK}.kept"
    for steps, workers in ((40, 4), (3, 1), (50, 1), (10, 1)):
        run(begin, folder, steps, workers)
    assert sorted(file.name for file in kept.glob("rank*")) == ["rank0.json"]  # and no file of another run
    assert capsys.readouterr().out.count("is kept in") == 2
    (folder / "rank0.json").write_text("{")  # what is damaged is not kept
    begin(folder)
    assert not (folder / "earlier").exists() and length(kept) == 50
    run(begin, folder, 2)
    assert choose(find_runs(tmp_path, tmp_path / "runs")[0]).one.name == f"runs/{TASK}.kept"


def test_after_a_crash_the_report_uses_the_run_before_it(tmp_path, begin):
    folder = tmp_path / "runs/pipeline"
    for mode in ("model_parallel", "pipeline_parallel"):  # both of the same length
        run(begin, folder, 40, task="pipeline", model_parallel_mode=mode, n_chunk=4, **PIPELINE)
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
