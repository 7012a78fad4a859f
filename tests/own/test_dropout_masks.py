"""Which ranks drop the same units: none in data parallel training; in a tensor group, those with equal activations."""

import json

import pytest

from common.paths import ROOT
from tests.own.workers import run

pytestmark = pytest.mark.medium

OWN_SEED = "set_seed(config.seed + worker.rank"


def masks(folder, script, *flags, world_size=2):
    """The masks that each rank drew in two steps."""
    run(ROOT / "tests/own/dropout_masks.py", world_size, folder, ROOT / script, folder, *flags, "--max_steps", 2)
    return [json.loads((folder / f"masks_{rank}.json").read_text()) for rank in range(world_size)]


def differ(first, second):
    pairs = [*zip(first["activations"], second["activations"], strict=True)]
    pairs += zip(first["attention"], second["attention"], strict=True)
    return bool(pairs) and all(a != b for a, b in pairs)


def test_two_workers_drop_different_units(tmp_path):
    first, second = masks(tmp_path, "task2b_allreduce/run_glue.py", "--do_train", "--per_gpu_train_batch_size", 4)

    assert differ(first, second)


def test_every_script_with_several_workers_has_a_seed_for_each():
    scripts = [*ROOT.glob("task*/run_*.py"), ROOT / "pipeline/run_gpt2.py", ROOT / "beyond/run_gpt2.py"]
    without = [script.parent.name for script in scripts if OWN_SEED not in script.read_text()]

    assert without == ["task1_single"]


def test_a_tensor_group_drops_the_same_activations_and_each_rank_its_own_attention_weights(tmp_path):
    first, second = masks(tmp_path, "beyond/run_gpt2.py", "--strategy", "tensor", "--batch_size", 8)

    assert first["activations"] == second["activations"] != []
    assert first["attention"] and not set(first["attention"]) & set(second["attention"])


@pytest.mark.proof
def test_the_tensor_groups_of_a_grid_drop_different_units(tmp_path):
    flags = ("--strategy", "grid", "--grid", "data=2,tensor=2", "--batch_size", 8)
    ranks = masks(tmp_path, "beyond/run_gpt2.py", *flags, world_size=4)

    assert ranks[0]["activations"] == ranks[1]["activations"] and ranks[2]["activations"] == ranks[3]["activations"]
    assert differ(ranks[0], ranks[2]) and differ(ranks[1], ranks[3])
    attention = [state for rank in ranks for state in rank["attention"]]
    assert len(set(attention)) == len(attention)
