"""A quick try does not destroy a record: the longest earlier run of a task's own folder is kept beside it."""

import json
from dataclasses import replace

import pytest

from common import record
from common.arguments import parse_glue_arguments
from common.workers.process_group import Worker
from handin.choice import choose
from handin.runs import find_runs
from tests.own.run_records import write_run

TASK = "task1_single"


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begins a new run in this folder of runs/."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    config = parse_glue_arguments(TASK, ["--output_dir", str(tmp_path / "elsewhere")])

    def begin_in(folder):
        record.Record(replace(config, output_dir=folder), Worker())

    return begin_in


def length(folder):
    return len(json.loads((folder / "rank0.json").read_text())["iterations"])


def test_the_longest_earlier_run_is_kept(tmp_path, begin, capsys):
    folder, kept = tmp_path / "runs" / TASK, tmp_path / "runs" / f"{TASK}.kept"
    for steps in (40, 3, 50, 10):
        write_run(folder, TASK, 1, steps=steps)
        begin(folder)

    assert length(kept) == 50
    assert not (folder / "rank0.json").exists()
    assert capsys.readouterr().out.count("is kept in") == 2


def test_a_run_that_is_kept_has_no_file_of_another(tmp_path, begin):
    folder = tmp_path / "runs" / TASK
    write_run(folder, TASK, 4, steps=5)
    begin(folder)
    write_run(folder, TASK, 1, steps=9)
    begin(folder)

    assert sorted(file.name for file in folder.with_name(f"{TASK}.kept").glob("rank*")) == ["rank0.json"]


def test_a_folder_that_was_named_is_overwritten_as_it_was_asked(tmp_path, begin):
    folder = tmp_path / "mine"
    write_run(folder, TASK, 1, steps=5)
    begin(folder)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_a_damaged_record_is_not_kept(tmp_path, begin):
    folder = tmp_path / "runs" / TASK
    folder.mkdir(parents=True)
    (folder / "rank0.json").write_text("{")
    begin(folder)

    assert not folder.with_name(f"{TASK}.kept").exists()


def test_the_report_uses_the_kept_run_where_the_newest_one_is_too_short(tmp_path, begin):
    folder = tmp_path / "runs" / TASK
    write_run(folder, TASK, 1, steps=120)
    begin(folder)
    write_run(folder, TASK, 1, steps=2)

    chosen = choose(find_runs(tmp_path, tmp_path / "runs")[0])

    assert chosen.one.name == f"runs/{TASK}.kept"
