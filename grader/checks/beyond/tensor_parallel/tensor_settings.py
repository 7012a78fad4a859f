"""Which columns of a block belong to whom, as literal tables."""

from dataclasses import dataclass

from tests.beyond.tensor_shared import FOUR, ONE, PAIRS, THREE, TWO

PROBE = "grader.probes.beyond.tensor_parallel"


@dataclass(frozen=True)
class Cut:
    """A block of GPT-2 for a group of some size: the columns of c_attn, the rows of its c_proj, and the columns of c_fc
    that each rank has, in the order of the group."""

    width: int
    heads: int
    inner: int
    attention: tuple[tuple[int, ...], ...]
    projection: tuple[tuple[int, ...], ...]
    hidden: tuple[tuple[int, ...], ...]


CUTS = {
    1: Cut(4, 2, 5, (tuple(range(12)),), ((0, 1, 2, 3),), ((0, 1, 2, 3, 4),)),
    2: Cut(
        8, 4, 6,
        ((0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19), (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23)),
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        ((0, 1, 2), (3, 4, 5)),
    ),
    3: Cut(
        6, 3, 6,
        ((0, 1, 6, 7, 12, 13), (2, 3, 8, 9, 14, 15), (4, 5, 10, 11, 16, 17)),
        ((0, 1), (2, 3), (4, 5)),
        ((0, 1), (2, 3), (4, 5)),
    ),
    4: Cut(
        8, 4, 12,
        ((0, 1, 8, 9, 16, 17), (2, 3, 10, 11, 18, 19), (4, 5, 12, 13, 20, 21), (6, 7, 14, 15, 22, 23)),
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)),
    ),
}  # fmt: skip
HEAD_TWICE_AS_WIDE = Cut(
    8, 2, 8,
    ((0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19), (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23)),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
)  # fmt: skip
BLOCKS = (
    (TWO, CUTS[2]), (PAIRS, HEAD_TWICE_AS_WIDE), (FOUR, CUTS[4]), (THREE, CUTS[3]), (ONE, CUTS[1]),
)  # fmt: skip
