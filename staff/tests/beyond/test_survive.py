"""The survive lesson with real kills: what remains is among the computed crash states, and nothing is lost but time."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from beyond.how_often import Job
from beyond.storage import Folder
from cluster.emulate import why_not
from common.paths import ROOT
from grader import ranks as grader_ranks
from grader.crash_states import crash_states
from grader.wire.request import Request
from staff.tests.beyond.killed_ranks import EVERY, SEED, STEPS
from tests.beyond.test_survive_stop import train

SCRIPT = ROOT / "staff/tests/beyond/killed_ranks.py"
ALONE = [(1, 0, 0)]


def scenarios(number, draw):
    """Some scenarios: one kill or two, each on a drawn rank at a drawn operation, and a run to the end."""
    for i in range(number):
        kills = []
        for _ in range(1 + i % 2):
            ranks = draw.choice([2, 3, 4])
            victim = draw.choice([0, draw.randrange(ranks)])
            kills.append((ranks, victim, draw.randint(1, 2 + 2 * ranks if victim == 0 else 3)))
        yield [*kills, (draw.choice([1, 2, 3, 4]), 0, 0)]


def run(folder, scenario_list):
    """The attempts of each scenario, as killed_ranks.py prints them."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], input=json.dumps(scenario_list), capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def updates(attempts):
    """The examples of each step, in the last attempt that has made it on all ranks."""
    merged = {}
    for attempt in attempts:
        of_ranks = [dict(own) for own in attempt["updates"]]
        for step in set.intersection(*map(set, of_ranks)):
            merged[step] = sorted(example for own in of_ranks for example in own[step])
    return merged


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in Folder(folder).list()}


def values(folder, scenario, attempt):
    return json.loads((folder / f"log{scenario}.{attempt}.values.0").read_text())


def computed(ranks, start):
    """The names in every crash state of a run without a kill, on what was there before it."""
    inputs, arguments = [None] * ranks, {"steps": STEPS, "every": EVERY, "seed": SEED}
    request = Request(inputs, "beyond/survive.py", train, arguments, storages=[start])
    states = crash_states(grader_ranks.run(request), "saved", start=start)
    return {frozenset(state.content) for state in states}


@pytest.mark.parametrize(
    "number", [pytest.param(4, marks=pytest.mark.medium), pytest.param(100, marks=pytest.mark.slow)]
)
def test_after_kills_nothing_is_lost_but_time_and_what_remains_was_computed(number, tmp_path):
    drawn = list(scenarios(number, random.Random(random.randrange(2**32))))
    (reference,), *results = run(tmp_path, [ALONE, *drawn])
    right, survived = values(tmp_path, 0, 0), 0
    assert len(losses((tmp_path / "log0.0.out.0").read_text())) == STEPS
    for i, (scenario, attempts) in enumerate(zip(drawn, results, strict=True), 1):
        start = {}
        for j, ((ranks, victim, n), attempt) in enumerate(zip(scenario, attempts, strict=True)):
            left, codes = contents(tmp_path / f"{i}.{j}"), attempt["codes"]
            assert None not in codes, f"a rank hangs: {scenario}"
            if n and codes[victim] == -9:
                assert all(codes), f"a rank has ended as if nobody was killed: {scenario}"
                assert frozenset(left) in computed(ranks, start), (scenario, sorted(left))
                survived += 1
            start = left

        assert set(attempts[-1]["codes"]) == {0}, scenario
        assert updates(attempts) == updates([reference]), scenario
        np.testing.assert_allclose(values(tmp_path, i, len(attempts) - 1), right, rtol=1e-9, atol=1e-9)
    assert survived >= number / 2


def losses(output):
    """The loss of each step, of the last attempt that has made it."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+) ranks", output)}


def start(folder, *words):
    """Run the lesson's script under an engine, which is the first words; return what both have printed."""
    command = [sys.executable, "-m", *map(str, words), "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def launched(folder, workers, *flags):
    return start(folder, "cluster.launch", "--workers", workers, "--", "beyond/run_survive.py", *flags)


@pytest.mark.proof
def test_torchrun_starts_all_again_after_two_kills_and_the_losses_are_those_of_a_quiet_run(tmp_path):
    quiet = launched(tmp_path / "quiet", 3)
    engine = ["torch.distributed.run", "--standalone", "--nproc-per-node", 4, "--max-restarts", 3]
    killed = start(tmp_path / "killed", *engine, "beyond/run_survive.py", "--kill", "2:4", "--kill", "0:5")

    assert quiet.returncode == killed.returncode == 0, killed.stderr
    assert killed.stderr.count("failed (exitcode: -9)") == 2
    assert losses(killed.stdout) == pytest.approx(losses(quiet.stdout), rel=1e-6)
    assert max(losses(killed.stdout)) == 40

    (tmp_path / "output.txt").write_text(killed.stdout)
    lost = [sys.executable, "beyond/lost_time.py", tmp_path / "output.txt", "--plot", tmp_path / "kills.png"]
    assert " 2 kills: " in subprocess.run(lost, capture_output=True, text=True, cwd=ROOT).stdout
    assert (tmp_path / "kills.png").stat().st_size > 5000


@pytest.mark.proof
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_a_node_is_taken_away_and_comes_back(tmp_path):
    quiet, outputs, codes = launched(tmp_path / "quiet", 2), "", []
    for nodes in (4, 3, 4):
        engine = ["cluster.emulate", "--nodes", nodes, "--", sys.executable, "beyond/run_survive.py"]
        place = ["--master_ip", "10.10.1.1", "--master_port", 6585, "--world_size", nodes, "--local_rank", "{rank}"]
        done = start(tmp_path / "nodes", *engine, *place, "--kill", "2:4")
        outputs, codes = outputs + done.stdout, [*codes, done.returncode]

    assert codes[0] and codes[1] and not codes[2], outputs
    assert losses(outputs) == pytest.approx(losses(quiet.stdout), rel=1e-6)


def test_the_simulated_goodput_is_that_of_the_formula_and_best_at_its_optimum():
    job = Job(save=12, restart=60, mtbf=3600)
    best = job.goodput(job.daly())

    for factor in (0.25, 1, 4):
        work = factor * job.daly()
        assert job.simulate(work, 20_000, seed=1) == pytest.approx(job.goodput(work), rel=0.02)
    assert best > max(job.goodput(job.daly() * 1.1), job.goodput(job.daly() / 1.1))
    assert job.goodput(job.young()) == pytest.approx(best, rel=0.001)
