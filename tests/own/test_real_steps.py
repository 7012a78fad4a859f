"""The real runs of `make check`: BERT's first steps on one worker and on two, and how a worker leaves the others.

Each mechanism that these runs need has a test of its own beside them, which says where to look.
"""

import sys

import pytest
from torch import nn
from torch.utils.data import DistributedSampler

from common.data.sample_data import glue_sample_dir
from common.data.samplers import ShuffledEachEpoch
from common.models.fit import set_dropout
from common.paths import ROOT
from tests.own.stopping_ranks import run_ranks
from tests.own.workers import mean_losses, run

pytestmark = pytest.mark.real

BATCH, EXAMPLES, EPOCHS = 12, 24, 2  # two steps in each epoch


def test_two_workers_have_the_mean_losses_of_one_over_two_epochs(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.tsv", "dev.tsv"):
        lines = (glue_sample_dir() / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (data / name).write_text("".join(lines[: 1 + EXAMPLES]), encoding="utf-8")

    def train(task, world_size):
        flags = ["--data_dir", data, "--model_name_or_path", "tiny", "--do_train", "--num_train_epochs", EPOCHS]
        flags += ["--dropout", 0, "--per_gpu_train_batch_size", BATCH // world_size]
        return mean_losses(run(ROOT / task / "run_glue.py", world_size, tmp_path / task, *flags))

    alone, together = train("task1_single", 1), train("task2b_allreduce", 2)

    assert len(alone) == EPOCHS * EXAMPLES // BATCH
    assert together == pytest.approx(alone, abs=1e-5)


def test_every_epoch_has_the_order_that_a_distributed_sampler_has_in_it():
    examples = range(EXAMPLES)
    one, shared = ShuffledEachEpoch(examples, seed=3), DistributedSampler(examples, num_replicas=1, rank=0, seed=3)

    orders = [list(one) for _ in range(3)]

    for epoch, order in enumerate(orders):
        shared.set_epoch(epoch)
        assert order == list(shared)
    assert orders[0] != orders[1] != orders[2]


def test_a_dropout_of_the_command_line_is_that_of_every_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Sequential(nn.Dropout(0.3)))
    model.config = object()

    set_dropout(model, 0.0)

    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.0, 0.0]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_rank_that_has_finished_waits_for_the_other_and_stops_with_it(tmp_path):
    stopped = run_ranks(tmp_path, "skips", 0, 2, "(3, 3, 3)")  # the last call of rank 1 has no partner

    assert stopped.codes == [3, 3]
    assert stopped.conclusion.endswith("in iteration 3, rank 0 called 2 collectives, rank 1 called 3 collectives")
