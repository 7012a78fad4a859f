"""The broker: reduce_scatter, all_to_all and all_gather into one tensor beside numpy, and the price of every call."""

import numpy as np
import pytest

from grader.verdicts import verdict_of
from tests.own.inline_student import player

pytestmark = pytest.mark.medium


@pytest.fixture
def play(tmp_path):
    return player(tmp_path, 3)


def test_sums_and_parts_are_those_that_numpy_computes(play):
    source = """
        def go(context):
            context.join()
            n, rank = context.world_size, context.rank
            mine = torch.arange(12.0).view(6, 2) ** (rank + 1)
            scattered, exchanged, gathered = torch.zeros(2, 2), torch.zeros(6, 2), torch.zeros(18, 2)
            handles = [dist.reduce_scatter_tensor(scattered, mine, async_op=True)]
            handles += [dist.all_to_all_single(exchanged, mine, async_op=True)]
            handles += [dist.all_gather_into_tensor(gathered, mine, async_op=True)]
            before = [float(t.abs().sum()) for t in (scattered, exchanged, gathered)]
            for handle in handles:
                handle.wait()
            return before, scattered, exchanged, gathered
    """
    inputs = [np.arange(12.0).reshape(6, 2) ** (rank + 1) for rank in range(3)]

    for rank, (before, scattered, exchanged, gathered) in enumerate(play(source).values):
        part = slice(2 * rank, 2 * rank + 2)
        assert before == [0, 0, 0]  # nothing arrives before wait()
        np.testing.assert_array_equal(scattered, sum(inputs)[part])
        np.testing.assert_array_equal(exchanged, np.concatenate([array[part] for array in inputs]))
        np.testing.assert_array_equal(gathered, np.concatenate(inputs))


def test_a_reduce_scatter_of_unequal_parts_gives_each_rank_the_sum_of_its_part(play):
    source = """
        def go(context):
            context.join()
            parts = [torch.arange(float(size)) + context.rank for size in (1, 3, 0)]
            mine = torch.zeros(len(parts[context.rank]))
            dist.reduce_scatter(mine, parts)
            return mine
    """

    result = play(source)

    assert [value.tolist() for value in result.values] == [[3], [3, 6, 9], []]
    assert [rank.calls[1].price for rank in result.ranks] == [12, 4, 16]


def test_unequal_parts_of_other_sizes_on_another_rank_do_not_agree(play):
    source = """
        def go(context):
            context.join()
            sizes = (3, 1, 2) if context.rank == 1 else (1, 3, 2)
            dist.reduce_scatter(torch.zeros(sizes[context.rank]), [torch.ones(size) for size in sizes])
    """

    assert "different sizes of parts" in play(source).explain()


def test_each_call_is_priced_by_the_fewest_bytes_that_it_needs(play):
    source = """
        def go(context):
            context.join()
            n, rank = context.world_size, context.rank
            dist.all_reduce(torch.ones(6))
            dist.reduce_scatter_tensor(torch.ones(2), torch.ones(6))
            dist.all_gather_into_tensor(torch.ones(6), torch.ones(2))
            dist.all_to_all_single(torch.ones(6), torch.ones(6))
            ring = [dist.P2POp(dist.isend, torch.ones(5), (rank + 1) % n)]
            ring += [dist.P2POp(dist.irecv, torch.ones(5), (rank - 1) % n)]
            for transfer in dist.batch_isend_irecv(ring):
                transfer.wait()
            dist.barrier()
    """

    for rank in play(source).ranks:
        prices = {call.name: call.price for call in rank.calls[1:]}
        whole = 6 * 4 * 2 / 3  # (N-1)/N S
        half = {name: pytest.approx(whole) for name in ("reduce_scatter", "all_gather", "all_to_all")}
        assert prices == {"all_reduce": pytest.approx(2 * whole), **half, "send": 20, "recv": 0, "barrier": 0}


IN_FLIGHT = {
    "would overwrite a tensor that is still being sent": """
        sending = dist.isend(x, right)
        dist.recv(x, left)
        sending.wait()
    """,
    "have not arrived yet: wait() for the receive first": """
        receiving = dist.irecv(x, left)
        sending = dist.isend(x, right)
        receiving.wait()
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
    "change it before the call or after wait()": """
        exchanging = dist.all_to_all_single(torch.ones(6), y := torch.ones(6), async_op=True)
        y.zero_()
        exchanging.wait()
    """,
}


@pytest.mark.parametrize("words", IN_FLIGHT)
def test_a_tensor_that_is_used_while_its_message_travels_is_an_error(play, words):
    head = """
        context.join()
        x, right, left = torch.ones(4), (context.rank + 1) % 3, (context.rank - 1) % 3
    """

    result = play("def go(context):" + head + IN_FLIGHT[words])

    assert words in result.explain()


def test_a_message_that_nobody_waits_for_is_no_right_program(play):
    source = """
        def go(context):
            context.join()
            dist.isend(torch.ones(4), (context.rank + 1) % 3)
            dist.recv(torch.ones(4), (context.rank - 1) % 3)
    """

    result = play(source)

    assert result.outcome == "returned"
    assert "rank 0 never waits for message #1 to rank 1" in str(verdict_of(result, "b.1"))
