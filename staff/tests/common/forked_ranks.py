"""Runs work on several ranks: processes forked from this one, which has imported all and computed nothing."""

import os
import sys
import traceback
from collections.abc import Callable

import torch._dynamo  # noqa: F401 (any optimizer imports it at its first step: once here, and not in every rank)


def on_ranks(world_size: int, work: Callable[[int], None]) -> None:
    """work(rank) in a forked process for each rank, to its end."""
    ranks = [fork_rank(rank, work) for rank in range(world_size)]
    statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
    if any(statuses):
        sys.exit(f"a rank of {world_size} failed, see above")


def fork_rank(rank: int, work: Callable[[int], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(rank)
        code = 0
    except BaseException:  # whatever it raises, this child ends here; its code says it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
