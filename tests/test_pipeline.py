"""Graders of the pipeline part: split and schedule (a4_2_1), Pipe (a4_2_2), GPT-2 in a pipeline."""

import pytest

from grader.checks.pipeline import compute, forward, gpt2, schedule, split, whole

graded = pytest.mark.graded


@graded("p.1", weight=2)
def test_consecutive_layers_on_one_device_form_one_partition(grade):
    split.check_neighbours(grade)


@graded("p.1")
def test_a_device_that_comes_again_makes_another_partition(grade):
    split.check_back_again(grade)


@graded("p.1")
def test_a_layer_without_parameters_joins_its_neighbour(grade):
    split.check_without_parameters(grade)


@graded("p.1")
def test_nested_sequentials_are_opened(grade):
    split.check_nested(grade)


@graded("p.1", absence=True)
def test_the_split_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed("pipeline/partition.py")


@graded("p.2", absence=True)  # two nested loops pass it
def test_every_micro_batch_comes_to_every_partition_once(grade):
    schedule.check(grade, schedule.once)


@graded("p.2", absence=True)
def test_micro_batches_go_from_partition_to_partition_in_order(grade):
    schedule.check(grade, schedule.in_order)


@graded("p.2", absence=True)
def test_a_partition_has_one_micro_batch_in_a_clock_cycle(grade):
    schedule.check(grade, schedule.one_at_a_time)


@graded("p.2", weight=2)
def test_the_schedule_is_as_short_as_it_can_be(grade):
    schedule.check(grade, schedule.as_short_as_can_be)


@graded("p.2", absence=True)
def test_the_schedule_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed("common/schedule.py")


@graded("p.4")
def test_compute_puts_each_result_where_its_micro_batch_was(grade):
    compute.check_results(grade)


@graded("p.4", weight=2)
def test_all_partitions_of_a_clock_cycle_work_at_the_same_time(grade):
    compute.check_same_time(grade)


@graded("p.4")
def test_each_partition_works_in_its_own_worker_and_on_its_device(grade):
    compute.check_workers(grade)


@graded("p.4")
def test_what_a_worker_raises_arrives_as_it_was_raised_and_all_threads_end(grade):
    compute.check_errors(grade)


@graded("p.4", absence=True)
def test_the_pipe_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed("pipeline/pipe.py")


@graded("p.3")
def test_micro_batches_have_split_size_examples(grade):
    forward.check_sizes(grade)


@graded("p.3")
def test_compute_is_called_once_for_every_clock_cycle(grade):
    forward.check_clocks(grade)


@graded("p.3")
def test_the_output_is_the_micro_batches_in_order_on_the_last_device(grade):
    forward.check_output(grade)


@graded("p.3")
def test_output_and_gradients_of_a_pipe_are_those_of_the_plain_model(grade):
    whole.check_plain(grade)
    whole.check_again(grade)


@graded("p.3")
def test_the_partitions_of_a_pipe_work_at_the_same_time(grade):
    whole.check_same_time(grade)


@graded("p.5")
def test_the_pipe_of_gpt2_holds_its_blocks(grade):
    gpt2.check_blocks(grade)
    grade.imports_only_allowed("pipeline/model_parallel.py", "pipeline/run_gpt2.py")


@graded("p.5")
def test_gpt2_sends_micro_batches_through_its_pipe(grade):
    gpt2.check_used(grade)


@graded("p.5")
def test_plain_model_parallel_and_piped_gpt2_agree_in_loss_and_gradients(grade):
    gpt2.check_agree(grade)


@graded("p.5")
def test_n_chunk_is_the_number_of_micro_batches(grade):
    gpt2.check_chunks(grade)
