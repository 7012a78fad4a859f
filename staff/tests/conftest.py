"""The tests here start scripts and compare what they compute: on the CPU, also where there is a GPU."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_gpu():
    """Hide GPUs from this process, which has not used any yet, and from those that it starts."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    yield
    if before is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = before


@pytest.fixture
def play(request, tmp_path):
    """Runs a student's file that is written in a test, on as many ranks as RANKS in the test's file says."""
    from staff.tests.grader.inline_student import (
        player,  # graded tests are collected beside this folder, and need none of it
    )

    return player(tmp_path, request.module.RANKS)
