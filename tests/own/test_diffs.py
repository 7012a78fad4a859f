"""Seen side by side, neighbouring scripts are a lecture slide: each differs from the last by one idea."""

import ast
import difflib

import pytest

from common.paths import ROOT

TASK1, TASK2A, TASK2B, TASK3, TASK4 = (
    ROOT / folder / "run_glue.py"
    for folder in ("task1_single", "task2a_gather_scatter", "task2b_allreduce", "task3_ddp", "task4_traffic")
)


def functions(script):
    """name -> its statements, one a line, without docstrings and comments."""
    statements = {}
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            statements[node.name] = ast.unparse(node).splitlines()
    return statements


def changes(before, after):
    """function -> (lines taken away, lines added), of those that differ."""
    old, new = functions(before), functions(after)
    different = {}
    for name in old.keys() | new.keys():
        lines = [line for line in difflib.ndiff(old.get(name, []), new.get(name, [])) if line[0] in "-+"]
        if lines:
            different[name] = tuple([line[2:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return different


@pytest.mark.parametrize(("before", "after", "where", "lost", "new"), [
    (TASK1, TASK2A, {"join", "sync_gradients", "train", "main"}, 2, 5),  # the group, the sampler and one call
    (TASK2A, TASK2B, {"sync_gradients", "main"}, 0, 0),  # the body of the sync
    (TASK2B, TASK3, {"sync_gradients", "wrap", "train", "main"}, 2, 0),  # the sync goes, the model is wrapped
    (TASK2B, TASK4, {"sync_gradients", "train", "main"}, 1, 1),  # what is sent is written down
])  # fmt: skip
def test_a_script_differs_from_the_one_before_by_one_idea(before, after, where, lost, new):
    different = changes(before, after)

    assert different.keys() == where
    taken, added = different.get("train", ([], []))
    assert (len(taken), len(added)) == (lost, new)
