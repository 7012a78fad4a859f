"""The solved lessons on shards, on real gloo: ZeRO-1, 2 and 3 train as one worker, and keep what the textbook says."""

import functools

import pytest
import torch

from beyond.checkpoint import _files
from beyond.sharded_model import ShardedModel
from common.errors import InputError
from common.paths import ROOT
from tests.own.warm import Script

pytestmark = pytest.mark.medium

RESUMED = {3: 1, 4: 2}  # number of workers -> that of the run that resumes from their checkpoint
SIZES = pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.proof)])
STAGES = pytest.mark.parametrize("stage", [1, 2, 3], ids="zero{}".format)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """kept(scene, world size) -> what each rank kept of a scene; with resumed=True, of the run that has resumed."""

    @functools.cache
    def run(size):
        folder = tmp_path_factory.mktemp("sharded")
        log = folder / "log"
        code = Script(ROOT / "tests/own/sharded_runs.py", (folder, size, RESUMED[size]), log).wait(timeout=360)
        assert code == 0, log.read_text()
        return folder

    def read(scene, size, resumed=False):
        folder, size = run(size), RESUMED[size] if resumed else size
        return [torch.load(folder / f"{scene}_{size}_{rank}.pt", weights_only=False) for rank in range(size)]

    return read


@SIZES
@STAGES
@pytest.mark.parametrize("resumed", [False, True], ids=["to the end", "resumed with other workers"])
def test_losses_and_parameters_are_those_of_one_worker(kept, size, stage, resumed):
    single = kept("trained", size)[0]["single"]
    for rank in kept("trained", size, resumed):
        losses = rank[stage]["losses"]
        assert losses == pytest.approx(single["losses"][-len(losses) :], abs=5e-6)
        assert len(losses) == len(single["losses"]) / (2 if resumed else 1)
        for name, parameter in rank[stage]["parameters"].items():
            torch.testing.assert_close(parameter, single["parameters"][name], atol=1e-5, rtol=0)


@SIZES
@STAGES
def test_what_stays_in_memory_is_the_textbook_s_within_one_percent(kept, size, stage):
    bytes_per_parameter = {1: 4 + 12 / size, 2: 4 + 12 / size, 3: 16 / size}[stage]  # gradients are sharded by finish()
    ranks = kept("trained", size)
    parameters = sum(parameter.numel() for parameter in ranks[0]["single"]["parameters"].values())
    for rank in ranks:
        assert rank[stage]["bytes"] == pytest.approx(bytes_per_parameter * parameters, rel=0.01)


BUILT = pytest.mark.parametrize("weights", ["random", "saved"])


@SIZES
@BUILT
def test_a_model_built_block_by_block_has_the_weights_of_one_built_at_once_bit_for_bit(kept, size, weights):
    ranks = [rank[weights] for rank in kept("deferred", size)]
    expected = ranks[0]["single"]
    for rank in ranks:
        assert rank["parameters"].keys() == expected["parameters"].keys()
        for name, parameter in rank["parameters"].items():
            assert torch.equal(parameter, expected["parameters"][name]), name
        assert torch.equal(rank["drawn"], expected["drawn"])


@SIZES
@BUILT
def test_its_losses_are_those_of_one_worker(kept, size, weights):
    ranks = [rank[weights] for rank in kept("deferred", size)]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(ranks[0]["single"]["losses"], abs=1e-5)


@SIZES
@BUILT
def test_while_it_is_built_a_rank_has_its_shards_and_two_blocks_in_memory_at_most(kept, size, weights):
    ranks = [rank[weights] for rank in kept("deferred", size)]
    whole = ranks[0]["single"]["bytes"]
    block = sum(p.nbytes for name, p in ranks[0]["parameters"].items() if name.startswith("transformer.h.0."))
    for rank in ranks:
        assert whole / size < rank["peak"] < whole / size + 2 * block < whole


def test_a_block_without_trainable_parameters_is_refused():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Tanh()])

    with pytest.raises(ValueError, match="expected trainable parameters in each block, and some outside"):
        ShardedModel(model, [model[1]], torch.optim.AdamW)


def test_a_checkpoint_without_one_rank_s_file_is_refused_by_name(tmp_path):
    for rank in (0, 1, 3):
        (tmp_path / f"shard{rank}_of_4.pt").touch()
    with pytest.raises(InputError, match=r"shard2_of_4\.pt missing; copy the files of all 4 ranks"):
        _files(tmp_path)
