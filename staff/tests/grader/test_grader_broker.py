"""The broker: what torch.distributed gives on it, and what it records."""

import numpy as np
import pytest

from grader.verdicts import verdict_of
from staff.tests.grader.inline_student import joined

pytestmark = pytest.mark.medium

RANKS = 3


# --- what the operations do -------------------------------------------------------------------------------------------

EVERY_OPERATION = """
    import torch.distributed._functional_collectives as functional

    OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]

    def on_broker(context):
        context.join()
        return every_operation(context.rank, context.world_size)

    def on_gloo(context):
        path = "file://" + context.arguments["store"]
        real = dist.init_process_group.__wrapped__
        real("gloo", init_method=path, rank=context.rank, world_size=context.world_size)
        return every_operation(context.rank, context.world_size)

    def every_operation(rank, n):
        torch.manual_seed(rank)
        got = {}
        def draw(dtype):
            return (torch.randn(3, 5) * 4).to(dtype)
        floats = torch.float32, torch.float64, torch.bfloat16, torch.float16
        for dtype in (*floats, torch.int64, torch.uint8, torch.bool):
            for op in OPS:
                if dtype is not torch.bool or op in OPS[:1] + OPS[3:]:
                    got[f"all_reduce {op} {dtype}"] = t = draw(dtype)
                    dist.all_reduce(t, op)
            got[f"broadcast {dtype}"] = t = draw(dtype)
            dist.broadcast(t, 1)
            got[f"gather {dtype}"] = pieces = [torch.zeros(3, 5).to(dtype) for _ in range(n)] if rank == 2 else None
            dist.gather(draw(dtype), pieces, dst=2)
            got[f"scatter {dtype}"] = t = torch.zeros(3, 5).to(dtype)
            dist.scatter(t, [draw(dtype) for _ in range(n)] if rank == 0 else None, src=0)
            got[f"all_gather {dtype}"] = pieces = [torch.zeros(3, 5).to(dtype) for _ in range(n)]
            dist.all_gather(pieces, draw(dtype))
        for dtype in (torch.float32, torch.float64):
            got[f"average {dtype}"] = t = draw(dtype)
            dist.all_reduce(t, dist.ReduceOp.AVG)
            t = draw(dtype)
            dist.reduce(t, 1)
            got[f"reduce {dtype}"] = t if rank == 1 else None
        got["version"] = torch.tensor(t._version)      # autograd does not see that a collective writes
        got["all_gather_into_tensor"] = t = torch.zeros(n * 4)
        dist.all_gather_into_tensor(t, torch.randn(4))
        for dtype in (torch.float32, torch.float64, torch.int64):
            got[f"reduce_scatter {dtype}"] = t = torch.zeros(2, 3).to(dtype)
            dist.reduce_scatter(t, [draw(dtype)[:2, :3].contiguous() for _ in range(n)])
            got[f"reduce_scatter_tensor {dtype}"] = t = torch.zeros(2, 5).to(dtype)
            dist.reduce_scatter_tensor(t, torch.cat([draw(dtype) for _ in range(n)])[: 2 * n].contiguous())
            got[f"all_to_all {dtype}"] = t = torch.zeros(n, 2).to(dtype)
            dist.all_to_all_single(t, draw(dtype)[:n, :2].contiguous())
            whole = torch.zeros(3 * (rank + 1), 2).to(dtype)  # rank j gets j + 1 rows of each
            got[f"all_to_all of unequal parts {dtype}"] = whole
            dist.all_to_all_single(whole, torch.cat([draw(dtype)] * 2)[:6, :2].contiguous(), [rank + 1] * n, [1, 2, 3])
        got["batch"] = t = torch.zeros(4)
        ring = [dist.P2POp(dist.isend, torch.randn(4), (rank + 1) % n), dist.P2POp(dist.irecv, t, (rank - 1) % n)]
        for transfer in dist.batch_isend_irecv(ring):
            transfer.wait()
        got["transposed"] = t = draw(torch.float32).t()
        dist.all_reduce(t)
        got["scalar"] = t = torch.tensor(rank + 0.5)
        dist.all_reduce(t)
        got["empty"] = t = torch.zeros(0, 3)
        dist.all_reduce(t)
        got["parameter"] = t = torch.nn.Parameter(torch.randn(2))
        dist.broadcast(t, 0)
        got["passed on"] = t = torch.zeros(4)
        if rank == 0:
            dist.send(torch.arange(4.0), 1)
        elif rank == 1:
            dist.recv(t, 0)
            dist.isend(t * 2, 2, tag=7).wait()
        else:
            dist.irecv(t, 1, tag=7).wait()
        pair = dist.new_group([0, 2])
        got["two of three"] = t = torch.tensor([1.0 + rank])
        if rank != 1:
            dist.all_reduce(t, group=pair)
            dist.broadcast(t, 2, group=pair)
            swapped = torch.zeros(2)
            sides = [dist.P2POp(dist.isend, torch.randn(2), 2 - rank, group=pair)]
            sides.append(dist.P2POp(dist.irecv, swapped, 2 - rank, group=pair))
            for transfer in dist.batch_isend_irecv(sides):
                transfer.wait()
            got["batch of two of three"] = swapped
            dist.destroy_process_group(pair)
        named = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        got["by the group's name"] = functional.wait_tensor(named)
        got["a group with a backend"] = t = torch.tensor([2.0 + rank])
        named = dist.new_group(ranks=[0, 1], backend="gloo")
        if rank != 2:
            dist.all_reduce(t, group=named)
        objects = [None] * n
        dist.all_gather_object(objects, {"rank": rank})
        got["objects"] = objects
        dist.barrier()
        return got
"""


def test_every_operation_gives_what_gloo_gives(play, tmp_path):
    broker = play(EVERY_OPERATION, entry="on_broker").values
    gloo = play(EVERY_OPERATION, entry="on_gloo", store=str(tmp_path / "store")).values

    for rank in range(3):
        assert broker[rank].keys() == gloo[rank].keys()
        for name, expected in gloo[rank].items():
            got = broker[rank][name]
            if name == "objects" or expected is None:
                assert got == expected
            else:
                tolerance = 0.02 if "float16" in name else 1e-6  # rounded once here, at every step there
                np.testing.assert_allclose(np.float64(got), np.float64(expected), tolerance, tolerance, err_msg=name)


def test_the_result_is_not_in_the_tensor_before_wait_or_a_barrier_as_with_gloo(play):
    source = joined("""
        kept, dropped, late = torch.ones(2), torch.ones(2), torch.ones(2)
        handle = dist.all_reduce(kept, async_op=True)
        dist.all_reduce(dropped, async_op=True)
        other = dist.all_reduce(late, async_op=True)
        dist.all_reduce(torch.ones(2))
        before = kept.clone()
        handle.wait()
        while not other.is_completed():
            pass
        seen = [float(tensor[0]) for tensor in (before, kept, late, dropped)]
        dist.barrier()
        dist.all_reduce(torch.ones(2), async_op=True)
        return [*seen, float(dropped[0])]
    """)

    result = play(source)

    assert result.values == [[1, 3, 3, 1, 3]] * 3
    waited = [call.waited for call in result.ranks[0].calls if call.name == "all_reduce"]
    assert waited == [True, True, True, True, False]  # the barrier has waited for the second


def test_the_bytes_of_each_call_are_counted_and_the_fewest_that_it_needs(play):
    source = joined("""
        dist.all_reduce(torch.ones(6))
        dist.reduce_scatter_tensor(g, torch.ones(6))
        dist.all_gather_into_tensor(torch.ones(6), g)
        dist.all_to_all_single(torch.ones(6), torch.ones(6))
        dist.gather(g, [torch.ones(2) for _ in range(n)] if rank == 0 else None)
        dist.scatter(g, [g] * n if rank == 0 else None)
    """)

    first, second, _ = play(source).ranks

    assert [(call.sent, call.received) for call in first.calls[5:]] == [(8, 24), (24, 8)]
    assert [(call.sent, call.received) for call in second.calls[5:]] == [(8, 0), (0, 8)]
    whole = 6 * 4 * 2 / 3  # (N-1)/N S
    assert [call.price for call in second.calls[1:5]] == pytest.approx([2 * whole, whole, whole, whole])


# --- tensors in flight ------------------------------------------------------------------------------------------------

IN_FLIGHT = {
    "would overwrite a tensor that is still being sent": """
        sending = dist.isend(x, right)
        dist.recv(x, left)
        sending.wait()
    """,
    "was changed while it was being sent": """
        sending = dist.isend(x, right)
        dist.recv(torch.ones(4), left)
        x.zero_()
        sending.wait()
    """,
    "between the call and its wait()": """
        summing = dist.all_reduce(x, async_op=True)
        x /= 3
        summing.wait()
    """,
    "rank 0 never waits for message #1 to rank 1": """
        dist.isend(x, right)
        dist.recv(torch.ones(4), left)
    """,
}


@pytest.mark.parametrize("words", IN_FLIGHT)
def test_a_tensor_that_is_used_while_its_message_travels_is_an_error(play, words):
    start = "        x, right, left = torch.ones(4), (rank + 1) % 3, (rank - 1) % 3"

    result = play(joined(start + IN_FLIGHT[words]))

    assert words in str(verdict_of(result, "b.1"))
