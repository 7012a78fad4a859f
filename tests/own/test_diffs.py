"""Seen side by side, neighbouring scripts are a lecture slide: each differs from the last by one idea."""

import ast
import difflib

from common.paths import ROOT

TASK1, TASK2A, TASK2B, TASK3, TASK4 = (
    ROOT / folder / "run_glue.py"
    for folder in ("task1_single", "task2a_gather_scatter", "task2b_allreduce", "task3_ddp", "task4_traffic")
)


def functions(script):
    """name -> its statements, one a line, without docstrings and comments."""
    found = {}
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            found[node.name] = ast.unparse(node).splitlines()
    return found


def changes(before, after):
    """function -> (lines taken away, lines added), of those that differ."""
    old, new = functions(before), functions(after)
    different = {}
    for name in old.keys() | new.keys():
        lines = [line for line in difflib.ndiff(old.get(name, []), new.get(name, [])) if line[0] in "-+"]
        if lines:
            different[name] = tuple([line[2:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return different


def test_task_2a_adds_the_group_the_sampler_and_one_call():
    different = changes(TASK1, TASK2A)

    assert different.keys() == {"join", "sync_gradients", "train", "main"}
    taken, added = different["train"]
    assert len(taken) == 2  # the order of all examples, and its loader
    assert "ShuffledEachEpoch" in taken[0]
    assert len(added) == 5
    assert "DistributedSampler" in added[0]
    assert "DataLoader" in added[1]
    assert "set_epoch" in added[2]
    assert added[3:] == ["with record.phase('communication'):", "sync_gradients(model, worker.world_size)"]
    assert len(different["main"][1]) == 3  # the task's name, `join` for the process group, and a seed for each worker


def test_task_2b_changes_the_body_of_the_sync_and_nothing_else():
    different = changes(TASK2A, TASK2B)

    assert different.keys() == {"sync_gradients", "main"}
    taken, added = different["sync_gradients"]
    assert len(taken) == 5
    assert len(added) == 2
    assert different["main"][1] == ["config = parse_glue_arguments('task2b_allreduce')"]


def test_task_3_takes_the_sync_away_and_wraps_the_model():
    different = changes(TASK2B, TASK3)

    assert different.keys() == {"sync_gradients", "wrap", "train", "main"}
    assert different["sync_gradients"][1] == []
    taken, added = different["train"]
    assert taken == ["with record.phase('communication'):", "sync_gradients(model, worker.world_size)"]
    assert added == []
    assert different["main"][1][-1] == "work(config, worker, wrap(model, worker), data, record)"


def test_task_4_writes_down_what_it_sends_and_lets_the_precision_be_chosen():
    different = changes(TASK2B, TASK4)

    assert different.keys() == {"sync_gradients", "train", "main"}
    assert len(different["sync_gradients"][1]) <= 9
    assert different["train"][1] == ["sync_gradients(model, worker.world_size, record.dtype, record.sent)"]
    assert different["main"][1] == [
        "config = parse_traffic_arguments('task4_traffic')",
        "record = TrafficRecord(config, worker)",
    ]
