"""Graders of tensor parallelism: f and g, the two layers, a block of GPT-2 cut by heads, the norm of its gradient."""

import pytest

from grader.checks.beyond.tensor_parallel import blocks, functions, norms, tensor_settings
from grader.checks.beyond.tensor_parallel.blocks import BlockRun
from grader.checks.beyond.tensor_parallel.functions import FunctionsRun
from grader.checks.beyond.tensor_parallel.layers import LayersRun

graded = pytest.mark.graded


@graded("b.11", points=1)
def test_f_and_g_sum_in_one_direction_and_pass_on_in_the_other(grade):
    for ranks in tensor_settings.ALL:
        FunctionsRun(grade, ranks).check()
    FunctionsRun(grade, tensor_settings.TWO, functions.STRIDED).check()


@graded("b.11", points=1)
def test_only_one_tensor_travels_in_each_direction(grade):
    for ranks in (tensor_settings.THREE, tensor_settings.PAIRS):
        FunctionsRun(grade, ranks).check_messages()


@graded("b.11", points=1)
def test_a_rank_keeps_copies_of_its_columns_or_rows(grade):
    grade.imports_only_allowed(tensor_settings.FILE)
    for ranks in tensor_settings.ALL:
        LayersRun(grade, ranks, passes=False).check_slices()


@graded("b.11", points=1)
def test_both_layers_compute_what_one_worker_computes(grade):
    for ranks in tensor_settings.ALL:
        LayersRun(grade, ranks).check_passes()
        LayersRun(grade, ranks).check_messages()


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
    for ranks in tensor_settings.ALL:
        norms.check(grade, ranks)
