"""Which ranks drop the same units: none in data parallel training; in a tensor group, those with equal activations."""

import json

import pytest

from cluster.launch import free_port
from common.paths import ROOT
from tests.own.warm import Script

pytestmark = pytest.mark.medium

MASKS = ROOT / "tests/own/dropout_masks.py"
OWN_SEED = "set_seed(config.seed + worker.rank)"
GRID_SEED = "set_seed(config.seed + worker.rank // config.grid.tensor)"
NO_OWN_HEADS = "from beyond.dropout import OwnHeads\nOwnHeads.draw_for = lambda *_: None\n\ndef main():"


def masks(folder, script, *flags, world_size=2, old="def main():", new="def main():"):
    """The masks that each rank drew in two steps."""
    (folder / "masks").mkdir()
    port = free_port()
    ranks = []
    for rank in range(world_size):
        words = [ROOT / script, folder / "masks", old, new, *flags, "--max_steps", 2, "--output_dir", folder / "run"]
        words += ["--no_cuda", "--master_ip", "127.0.0.1", "--master_port", port]
        words += ["--world_size", world_size, "--local_rank", rank]
        ranks.append(Script(MASKS, words, folder / f"log_{rank}"))
    codes = [rank.wait(timeout=240) for rank in ranks]
    assert codes == [0] * world_size, (folder / "log_0").read_text()[-2000:]
    return [json.loads((folder / f"masks/masks_{rank}.json").read_text()) for rank in range(world_size)]


GLUE = ("--do_train", "--per_gpu_train_batch_size", 4)
SCRIPTS = [
    ("task2b_allreduce/run_glue.py", GLUE),
    ("task3_ddp/run_gpt2.py", ("--batch_size", 8)),
    *[
        pytest.param(*row, marks=pytest.mark.proof)
        for row in (
            ("task2a_gather_scatter/run_glue.py", GLUE),
            ("task3_ddp/run_glue.py", GLUE),
            ("task4_traffic/run_glue.py", GLUE),
            ("beyond/run_gpt2.py", ("--strategy", "zero3", "--batch_size", 8)),
        )
    ],
]


def differ(first, second):
    pairs = [*zip(first["activations"], second["activations"], strict=True)]
    pairs += zip(first["attention"], second["attention"], strict=True)
    return bool(pairs) and all(a != b for a, b in pairs)


@pytest.mark.parametrize(("script", "flags"), SCRIPTS)
def test_two_workers_drop_different_units(tmp_path, script, flags):
    first, second = masks(tmp_path, script, *flags)

    assert differ(first, second)


def test_with_one_seed_two_workers_drop_the_same_units(tmp_path):
    first, second = masks(tmp_path, "task2b_allreduce/run_glue.py", *GLUE, old=OWN_SEED, new="pass")

    assert first == second and first["activations"]


def test_every_script_with_several_workers_has_a_seed_for_each():
    scripts = [*ROOT.glob("task*/run_*.py"), ROOT / "pipeline/run_gpt2.py", ROOT / "beyond/run_gpt2.py"]
    without = [script.parent.name for script in scripts if OWN_SEED[:-1] not in script.read_text()]

    assert without == ["task1_single"]


TENSOR = ("--strategy", "tensor", "--batch_size", 8)


def test_a_tensor_group_drops_the_same_activations_and_each_rank_its_own_attention_weights(tmp_path):
    first, second = masks(tmp_path, "beyond/run_gpt2.py", *TENSOR)

    assert first["activations"] == second["activations"] != []
    assert first["attention"] and not set(first["attention"]) & set(second["attention"])


def test_with_one_generator_a_tensor_group_drops_the_same_attention_weights(tmp_path):
    first, second = masks(tmp_path, "beyond/run_gpt2.py", *TENSOR, old="def main():", new=NO_OWN_HEADS)

    assert first["attention"] == second["attention"] != []


def test_with_a_seed_for_each_rank_a_tensor_group_drops_different_activations(tmp_path):
    first, second = masks(tmp_path, "beyond/run_gpt2.py", *TENSOR, old=GRID_SEED, new=OWN_SEED)

    assert differ(first, second)


@pytest.mark.proof
def test_the_tensor_groups_of_a_grid_drop_different_units(tmp_path):
    flags = ("--strategy", "grid", "--grid", "data=2,tensor=2", "--batch_size", 8)
    ranks = masks(tmp_path, "beyond/run_gpt2.py", *flags, world_size=4)

    assert ranks[0]["activations"] == ranks[1]["activations"] and ranks[2]["activations"] == ranks[3]["activations"]
    assert differ(ranks[0], ranks[2]) and differ(ranks[1], ranks[3])
    assert len({state for rank in ranks for state in rank["attention"]}) == sum(
        len(rank["attention"]) for rank in ranks
    )
