"""The broker under DistributedDataParallel: it trains as it does on gloo."""

import numpy as np
import pytest

from tests.own.inline_student import player

pytestmark = pytest.mark.medium


@pytest.fixture
def play(tmp_path):
    return player(tmp_path, 3)


DDP = """
    def model():
        torch.manual_seed(3)
        layers = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
        return torch.nn.Sequential(*layers).double()

    def go(context):
        context.join()
        wrapped = model()
        with torch.no_grad():
            for parameter in wrapped.parameters():
                parameter += context.rank            # DDP's first broadcast has to undo this
        wrapped.eval()                               # batch statistics of a shard are not those of the batch
        ddp = torch.nn.parallel.DistributedDataParallel(wrapped, bucket_cap_mb=0.0001)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        shards = context.arguments["x"].chunk(context.world_size)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(shards[context.rank]).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in ddp.parameters()]

    def plain(context):
        alone = model().eval()
        optimizer = torch.optim.SGD(alone.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            alone(context.arguments["x"]).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in alone.parameters()]
"""


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_distributed_data_parallel_trains_as_one_process_does(play, world_size):
    x = {"x": np.random.default_rng().normal(size=(8, 6))}

    result = play(DDP, world_size, **x)
    (expected,) = play(DDP, 1, function="plain", **x).values

    for value in result.values:
        for got, wanted in zip(value, expected, strict=True):
            np.testing.assert_allclose(got, wanted, 1e-12)
    inside = [call.inside for call in result.ranks[0].calls if call.name in ("broadcast", "all_reduce")]
    assert {"DistributedDataParallel", "backward"} == set(inside)
    assert inside.count("backward") >= 6  # several buckets in each of three steps


def test_ddp_finds_unused_parameters_and_skips_what_no_sync_skips(play):
    source = """
        def go(context):
            context.join()
            model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)])
            model.forward = lambda x: model[0](x)
            ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
            x = torch.full((1, 1), float(context.rank))
            with ddp.no_sync():
                ddp(x).backward()
            before = model[0].weight.grad.clone()
            ddp(x).backward()
            return before, model[0].weight.grad, model[1].weight.grad is None
    """

    for rank, (before, after, unused) in enumerate(play(source).values):
        assert (before.item(), after.item(), unused) == (rank, 2.0, True)


def test_a_ddp_communication_hook_of_the_students_own_works(play):
    source = """
        def halve(state, bucket):
            buffer = bucket.buffer().div_(context_size)
            return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])

        def go(context):
            global context_size
            context.join()
            context_size = context.world_size
            linear = torch.nn.Linear(2, 1, bias=False)
            ddp = torch.nn.parallel.DistributedDataParallel(linear)
            ddp.register_comm_hook(None, halve)
            ddp(torch.full((1, 2), float(context.rank))).sum().backward()
            return linear.weight.grad
    """

    assert all((value == 1).all() for value in play(source).values)
