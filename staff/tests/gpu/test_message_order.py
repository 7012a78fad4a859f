"""No schedule and no ring can deadlock under NCCL's order of messages, and every message is waited for.

ProcessGroupNCCL has a first-in, first-out queue for every pair of ranks of a group, for single sends and receives, and
one for the whole group, for a batch (`batch_isend_irecv`), whose members run together. The first entries of two queues
meet if one sends and the other receives; a large send does not end before. The first single message of a pair connects
the two ranks: the call itself returns only when the other rank has come to its first call there.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from beyond import ring, stage_runner
from beyond.on_grid import SCHEDULES
from pipeline import distributed
from staff.tests.gpu.fake_group import joined

SIZES = [(stages, micro_batches) for stages in (2, 3, 4) for micro_batches in range(1, 9)]
PIPELINE = "pipeline"

Key = tuple[Any, ...]  # the group, and the pair of ranks if it is not a batch


@dataclass
class Transfer:
    """A call: its queue, and the messages that are not done, as (is a send, the other rank)."""

    key: Key
    messages: list[tuple[bool, int]]


@dataclass
class Program:
    """What a rank does, in order: it starts a Transfer, or waits for one. Stands for torch.distributed."""

    rank: int
    steps: list[tuple[str, Transfer]] = field(default_factory=list)

    def start(self, key: Key, messages: list[tuple[bool, int]]) -> "SentHandle":
        self.steps.append(("start", Transfer(key, messages)))
        return SentHandle(self, self.steps[-1][1])

    def one(self, is_send: bool) -> "Callable[..., SentHandle]":
        def call(tensor: object, peer: int, group: object = None) -> SentHandle:
            return self.start((group, min(self.rank, peer), max(self.rank, peer)), [(is_send, peer)])

        call.__name__ = "isend" if is_send else "irecv"
        return call

    def batch(self, messages: Sequence[dist.P2POp]) -> "list[SentHandle]":
        """Stand for batch_isend_irecv."""
        return [self.start((None,), [(one.op.__name__ == "isend", one.peer) for one in messages])]


@dataclass
class SentHandle:
    program: Program
    transfer: Transfer

    def wait(self) -> None:
        self.program.steps.append(("wait", self.transfer))


def stuck(programs: Sequence[Program]) -> list[str]:
    """Return "rank r at step s of t" for each rank that never ends; none if all messages arrive."""
    queues: dict[tuple[int, Key], deque[Transfer]] = {}
    at = [0] * len(programs)
    connected = set[Key]()
    moved = True
    while moved:
        moved = False
        for program in programs:
            while at[program.rank] < len(program.steps):
                kind, transfer = program.steps[at[program.rank]]
                if kind == "wait" and transfer.messages:
                    break
                if kind == "start" and len(transfer.key) > 1 and transfer.key not in connected:
                    if not all(comes_to(programs[rank], at[rank], transfer.key) for rank in transfer.key[1:]):
                        break
                    connected.add(transfer.key)
                if kind == "start":
                    queues.setdefault((program.rank, transfer.key), deque()).append(transfer)
                at[program.rank] += 1
                moved = True
        for (rank, key), queue in queues.items():
            for is_send, peer in list(queue[0].messages) if queue else []:
                others = queues.get((peer, key))
                if others and (not is_send, rank) in others[0].messages:
                    queue[0].messages.remove((is_send, peer))
                    others[0].messages.remove((not is_send, rank))
                    moved = True
        for queue in queues.values():
            while queue and not queue[0].messages:
                queue.popleft()
    left = {rank for (rank, _), queue in queues.items() if queue}
    return [
        f"rank {program.rank} at step {at[program.rank]} of {len(program.steps)}"
        for program in programs
        if at[program.rank] < len(program.steps) or program.rank in left
    ]


def comes_to(program: Program, at: int, key: Key) -> bool:
    """Return whether the rank's next step is a call in this queue."""
    return at < len(program.steps) and program.steps[at][0] == "start" and program.steps[at][1].key == key


class SmallModel(nn.Module):
    """A stage of one matrix; the first and the last stage share it."""

    width = 4

    def __init__(self, rank: int, stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = rank == 0, rank == stages - 1
        self.table = nn.Parameter(torch.ones(8, 4))

    def forward(self, x):
        x = self.table[x] if self.is_first else x * self.table[0]
        return x @ self.table.t() if self.is_last else x

    def shared_parameter(self):
        return self.table


def stub(program: Program, ranks: int) -> SimpleNamespace:
    """torch.distributed for one rank: notes messages, moves nothing."""
    return SimpleNamespace(
        isend=program.one(True),
        irecv=program.one(False),
        send=blocking(program.one(True)),
        recv=blocking(program.one(False)),
        batch_isend_irecv=program.batch,
        P2POp=lambda op, tensor, peer: SimpleNamespace(op=op, peer=peer),
        get_rank=lambda group=None: program.rank,
        get_world_size=lambda group=None: ranks,
        get_process_group_ranks=lambda group: list(range(ranks)),
    )


def blocking(call):
    return lambda tensor, peer=None, group=None, **named: call(
        tensor, named.get("src", named.get("dst", peer)), group
    ).wait()


def step_of_runner(program: Program, schedule: str, stages: int, micro_batches: int) -> None:
    """A step of the lessons' runner, its exchange of the shared matrix, and an evaluation."""
    with mock.patch.object(stage_runner, "dist", stub(program, stages)):
        runner = stage_runner.StageRunner(SmallModel(program.rank, stages), PIPELINE)
        tokens = [torch.zeros(1, 3, dtype=torch.int64) for _ in range(micro_batches)]
        runner.run(SCHEDULES[schedule](micro_batches, stages, program.rank), tokens)
        runner.finish()
        runner.only_forward(tokens[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_stage_runner_ends_for_every_number_of_stages_and_micro_batches(schedule):
    for stages, micro_batches in SIZES:
        programs = [Program(rank) for rank in range(stages)]
        for program in programs:
            step_of_runner(program, schedule, stages, micro_batches)
        assert not stuck(programs), f"{stages} stages, {micro_batches} micro-batches"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_asks_for_a_gradient_only_when_it_has_sent_the_activations(schedule):
    for stages, micro_batches in SIZES:
        program = Program(0)
        step_of_runner(program, schedule, stages, micro_batches)
        started = [transfer for kind, transfer in program.steps if kind == "start"]
        to_the_right = [transfer.messages[0][0] for transfer in started if transfer.messages[0][1] == 1]
        balance = list(accumulate(1 if is_send else -1 for is_send in to_the_right))
        assert min(balance) == 0, f"{stages} stages, {micro_batches} micro-batches"


def test_every_message_of_the_stage_runner_is_waited_for():
    for rank in range(3):
        program = Program(rank)
        step_of_runner(program, "1f1b", 3, 4)
        started = {id(transfer) for kind, transfer in program.steps if kind == "start"}
        assert started == {id(transfer) for kind, transfer in program.steps if kind == "wait"}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_the_ring_ends(ranks):
    programs = [Program(rank) for rank in range(ranks)]
    for program in programs:
        with mock.patch.object(ring, "dist", stub(program, ranks)):
            ring.all_reduce(torch.zeros(7))
    assert not stuck(programs)


@pytest.mark.parametrize("schedule", distributed.STAGES_PER_PROCESS)
def test_the_schedules_between_processes_end(schedule):
    here = distributed.STAGES_PER_PROCESS[schedule]
    for processes, micro_batches in SIZES:
        if (schedule == "1f1b" and micro_batches < processes) or (
            schedule == "interleaved" and micro_batches % processes
        ):
            continue  # torch refuses these
        programs = [Program(rank) for rank in range(processes)]
        for program in programs:
            single = {"isend": in_one_group(program.one(True)), "irecv": in_one_group(program.one(False))}
            calls = {"batch_isend_irecv": program.batch, "send": blocking(program.one(True)), "recv": agree(program)}
            with joined(program.rank, processes), mock.patch.multiple(dist, **calls, **single):
                with mock.patch.multiple(dist.distributed_c10d, **single):  # P2POp takes no others
                    step_between_processes(program, schedule, here, micro_batches)
        assert all(program.steps for program in programs)
        assert not stuck(programs), f"{processes} processes, {micro_batches} micro-batches"


def in_one_group(call):
    """isend() or irecv() as torch's stages call it; their group is that of all ranks."""

    def single(tensor, peer=None, group=None, tag=0, group_dst=None, group_src=None):
        numbers = [number for number in (peer, group_dst, group_src) if number is not None]
        return call(tensor, numbers[0])

    single.__name__ = call.__name__
    return single


def agree(program):
    """recv(), which receives ones only: with them, torch's stages vote for the shapes that they were given."""

    def receive(tensor, src, group=None):
        blocking(program.one(False))(tensor.fill_(1), src, group)

    return receive


def step_between_processes(program: Program, schedule: str, here: int, micro_batches: int) -> None:
    """One step of torch's schedule on stages of one layer, and the exchange of the shared matrix."""
    last = dist.get_world_size() - 1
    real, example = distributed.PipelineStage, torch.zeros(1, 2)

    def stage(module, index, count, device):  # without shapes, the ranks would ask each other
        x, y = (example.clone().requires_grad_(needed) for needed in (index > 0, True))
        return real(module, index, count, device, input_args=x, output_args=y)

    with mock.patch.object(distributed, "PipelineStage", stage):
        layers = [nn.Linear(2, 2) for _ in range(here)]
        made = distributed.make_schedule(schedule, layers, micro_batches, nn.functional.mse_loss, torch.device("cpu"))
    whole = torch.zeros(micro_batches, 2)
    made.step(*([whole] if program.rank == 0 else []), target=whole if program.rank == last else None, losses=[])
    if program.rank in (0, last):
        processes = SimpleNamespace(shared=nn.Parameter(torch.zeros(2)))
        processes.shared.grad = torch.zeros(2)
        distributed.PipelinedProcesses._add_shared_gradients(processes, last - program.rank)
