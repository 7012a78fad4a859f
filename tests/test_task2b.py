"""Graders of task 2b: all_reduce (BERT), data partitions (a4_1_1), GPT-2 on several processes (a4_1_2)."""

import pytest

from grader.checks import partition_loaders, partitions, start
from grader.checks.training import averaging, steps, updates

graded = pytest.mark.graded
GLUE, GPT2, DATA = "task2b_allreduce/run_glue.py", "task2b_allreduce/run_gpt2.py", "common/data_partition.py"
CLIP = 0.05  # below the norm of any gradient here, so that clipping always shows


@graded("2b.1", points=1, needs=["2a.2"])
def test_task2b_averages_before_it_clips(grade):
    updates.check_steps(steps.glue(grade, 3, train=12, batch=2, num_train_epochs=2), 4)
    clipped = steps.glue(grade, 2, train=12, batch=3, num_train_epochs=2, max_grad_norm=CLIP)
    updates.check_clipping(clipped, 4, CLIP)
    updates.check_sent_once(clipped)


@graded("2b.2", points=2)
def test_a_partition_gives_the_examples_at_its_indices(grade):
    partitions.check_partition(grade)


@graded("2b.3", points=2)
def test_every_example_is_in_one_partition(grade):
    partitions.check_once(grade)


@graded("2b.3", points=1)
def test_partitions_have_the_sizes_asked_for(grade):
    partitions.check_sizes(grade)


@graded("2b.3", points=1)
def test_partitions_follow_the_seed_and_nothing_else(grade):
    partitions.check_seed(grade)


@graded("2b.3", points=1)
def test_partitions_are_shuffled_and_the_data_is_not(grade):
    partitions.check_shuffled(grade)


@graded("2b.3", points=1, absence=True)
def test_data_partition_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(DATA)


@graded("2b.4", points=2)
def test_use_gives_the_same_partition_every_time(grade):
    partitions.check_use(grade)


@graded("2b.5", points=1)
def test_a_worker_gets_its_share_of_the_batch(grade):
    partition_loaders.check_share(grade)


@graded("2b.5", points=1)
def test_all_workers_have_the_same_number_of_batches(grade):
    partition_loaders.check_counts(grade)


@graded("2b.5", points=1)
def test_no_example_is_on_two_workers_or_lost(grade):
    partition_loaders.check_no_overlap(grade)


@graded("2b.5", points=1)
def test_partition_dataset_asks_the_process_group_and_collates(grade):
    partition_loaders.check_group_and_collate(grade)


@graded("2b.6", points=1)
def test_setup_joins_at_the_courses_address(grade):
    start.check_setup_address(grade)


@graded("2b.6", points=1)
def test_setup_joins_with_the_rank_size_and_backend_it_was_given(grade):
    start.check_setup(grade)


@graded("2b.8", points=2)
def test_gpt2_averages_in_every_step_before_it_clips(grade):
    averaging.check_every_step(grade)
    averaging.check_kept(grade)


@graded("2b.9", points=1)
def test_every_worker_is_started_and_waited_for(grade):
    start.check_started(grade)


@graded("2b.9", points=1, network=True)
def test_the_script_trains_on_two_workers(grade):
    start.check_script(grade)


@graded("2b.9", points=1, absence=True)
def test_task2b_imports_only_what_the_course_allows(grade):
    grade.imports_only_allowed(GLUE, GPT2)
