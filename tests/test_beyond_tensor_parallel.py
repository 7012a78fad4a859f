"""Graders of tensor parallelism: a block of GPT-2 cut by heads, and the norm of its gradient."""

import pytest

from grader.checks.beyond.tensor_parallel import blocks, norms, tensor_settings
from grader.checks.beyond.tensor_parallel.blocks import BlockRun
from tests.beyond.tensor_shared import ALL

graded = pytest.mark.graded


@graded("b.12", points=1)
def test_attention_columns_are_those_of_whole_heads_in_each_third(grade):
    blocks.check_columns(grade)


@graded("b.12", points=1)
def test_each_rank_has_whole_heads_and_its_part_of_the_mlp(grade):
    for ranks, cut in tensor_settings.BLOCKS:
        BlockRun(grade, ranks, cut).check_slices()


@graded("b.12", points=1)
def test_a_cut_block_computes_and_sends_what_it_must(grade):
    for ranks, cut in tensor_settings.BLOCKS:
        run = BlockRun(grade, ranks, cut)
        run.check_passes()
        run.check_messages()
    for ranks, cut in tensor_settings.BLOCKS[:3]:
        BlockRun(grade, ranks, cut, blocks.RESIDUAL).check_passes()
        BlockRun(grade, ranks, cut, blocks.BOTH).check_agreement()


@graded("b.12", points=1)
def test_the_norm_counts_every_parameter_once(grade):
    for ranks in ALL:
        norms.check(grade, ranks)
