"""Before joining the process group, every worker announces itself, so that a mistake is reported and does not hang.

Rank 0 listens on master_ip:master_port. The others connect and say who they are, and rank 0 greets each. When all are
there, it says so to all, or what is wrong, and leaves the port to the lesson's own init_process_group. The connections
stay: on them, a rank learns at once that another one has ended, and where each of them is (watch.py).
"""

import contextlib
import errno
import itertools
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from common.config import RunConfig
from common.errors import InputError, OtherRankError
from common.workers.channel import Channel, Process
from common.workers.machine import own_address

GREETING_SECONDS = 2.0  # rank 0 greets at once; a run that has begun never does
ANSWER_SECONDS = 10.0  # how much longer than --join_seconds another rank waits for rank 0's answer
IN_USE = "a run that has begun, or another program, uses this port"
# What must be the same on all workers (the timeline communicates, too), each with the verb for a message.
MUST_AGREE = {"world_size": "has --world_size", "task": "runs", "timeline": "has --timeline", "backend": "uses"}

Connected = dict[int, tuple[Process, Channel]]  # rank -> its process, and the connection to it

_groups_joined = itertools.count()  # by this process


@dataclass(frozen=True)
class Roll:
    """All ranks, and this one's channels: on rank 0 to every other rank, on these to rank 0."""

    processes: dict[int, Process]
    channels: dict[int, Channel]


def call_the_roll(config: RunConfig, notes: str = "") -> Roll:
    """Return when all workers have connected. Otherwise raise InputError on every worker, with the reason."""
    own = Process(notes=notes)
    if config.world_size == 1:
        return Roll({0: own}, {})
    try:
        families = {family for family, *_ in socket.getaddrinfo(config.master_ip, None)}
    except socket.gaierror as error:
        raise InputError(
            f"--master_ip: {config.master_ip} does not resolve on this machine ({error.strerror}); give rank 0's IP "
            "address, or a name that every machine knows"
        ) from None
    if socket.AF_INET not in families:
        raise InputError(f"--master_ip: {config.master_ip} is an IPv6 address; give rank 0's IPv4 address")
    deadline = time.monotonic() + config.join_seconds
    store = _store_of_torchrun(config)
    if config.rank == 0:
        with _listen(config, own, at_master_port=store is None) as server:
            if store:
                store.set("rank 0", "{} {}".format(*server.getsockname()))
            return _answer_all(server, config, own, deadline)
    ip, port = store.get("rank 0").decode().split() if store else (config.master_ip, config.master_port)
    return _report_in((ip, int(port)), config, own, deadline)


def _store_of_torchrun(config: RunConfig) -> dist.Store | None:
    """Return the store that listens on --master_port under torchrun; there, rank 0 takes a port of its own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    timeout = timedelta(seconds=config.join_seconds)
    store = dist.TCPStore(config.master_ip, config.master_port, is_master=False, timeout=timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"roll call {attempt}, {next(_groups_joined)}", store)


def _answer_all(server: socket.socket, config: RunConfig, own: Process, deadline: float) -> Roll:
    """On rank 0: wait for the others, then send the result to all of them."""
    connected: Connected = {}
    duplicates: list[str] = []
    problem = ""
    while not problem:
        if len(connected) == config.world_size - 1:
            for rank, (_, channel) in list(connected.items()):
                if _has_left(channel):  # stopped while the others were waited for
                    del connected[rank]
        if len(connected) == config.world_size - 1:
            break
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            channel = Channel(server.accept()[0])
        except TimeoutError:
            missing = [str(rank) for rank in range(1, config.world_size) if rank not in connected]
            problem = (
                f"rank {', '.join(missing)} of {config.world_size} did not connect within "
                f"{config.join_seconds:g} s; start every worker with the same --master_ip, --master_port "
                f"and --world_size{''.join(f' ({duplicate})' for duplicate in duplicates)}"
            )
            break
        problem = _check_in(channel, config, own, connected, duplicates)
    server.close()  # before the answer: what connects from now on is meant for the lesson's own store
    processes = {0: own} | {rank: process for rank, (process, _) in sorted(connected.items())}
    for _, channel in connected.values():
        channel.send(problem=problem, processes={rank: asdict(process) for rank, process in processes.items()})
    if problem:
        for _, channel in connected.values():
            channel.close()
        raise InputError(problem)
    return Roll(processes, {rank: channel for rank, (_, channel) in connected.items()})


def _has_left(channel: Channel) -> bool:
    channel.receive(0)
    return channel.has_left


def _check_in(channel: Channel, config: RunConfig, own: Process, connected: Connected, duplicates: list[str]) -> str:
    """Read one worker's message; return what is wrong with the whole run, "" if nothing is.

    If a rank was started twice, only the second process is refused.
    """
    try:
        who = channel.receive(5)[0]
        rank, process = int(who["rank"]), Process(**who["process"])
        differing = [name for name in MUST_AGREE if who[name] != getattr(config, name)]
    except (IndexError, ValueError, KeyError, TypeError):
        return ""  # not one of ours, for instance a port scan: continue to wait
    if rank == 0 or (rank in connected and not _has_left(connected[rank][1])):
        first = own if rank == 0 else connected[rank][0]
        channel.send(problem=f"rank {rank} has already joined ({first}): start this worker with another --local_rank")
        duplicates.append(f"rank {rank} was started twice, the second time as {process}")
        print(f"{duplicates[-1]}: refused; still waiting for the others", file=sys.stderr, flush=True)
        return ""
    channel.send(greeting="wait for the others")
    connected[rank] = process, channel  # the one that differs gets the answer as well
    if not differing:
        return ""
    name = differing[0]
    verb, advice = MUST_AGREE[name], "; use --no_cuda everywhere" if name == "backend" else ""
    return f"rank {rank} ({process}) {verb} {who[name]}, rank 0 {verb} {getattr(config, name)}{advice}"


def _listen(config: RunConfig, own: Process, at_master_port: bool) -> socket.socket:
    if not at_master_port:
        return socket.create_server((own_address(config.master_ip), 0), backlog=config.world_size)
    address = (config.master_ip, config.master_port)
    try:
        return socket.create_server(address, backlog=config.world_size)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            with contextlib.suppress(OSError):
                channel = Channel(socket.create_connection(address, GREETING_SECONDS))
                _announce(channel, config, own)
                answers = channel.receive(GREETING_SECONDS)  # of a rank 0 that waits for its workers
                channel.close()
                if answers:
                    raise InputError(answers[0]["problem"]) from None
        hint = f"{IN_USE}: choose another --master_port"
        if "assign" in str(error):
            hint = "--master_ip must be an address of the machine on which rank 0 runs"
        raise InputError(
            f"rank 0 cannot listen on {address[0]}:{address[1]} ({error.strerror or error}); {hint}"
        ) from None


def _announce(channel: Channel, config: RunConfig, own: Process) -> None:
    channel.send(**{name: getattr(config, name) for name in ("rank", *MUST_AGREE)}, process=asdict(own))


def _report_in(address: tuple[str, int], config: RunConfig, own: Process, deadline: float) -> Roll:
    """On any other rank: connect to rank 0, announce this rank, wait for the answer."""
    channel = Channel(_connect(address, config, deadline))
    try:
        return Roll(_hear_answer(channel, address, config, own, deadline), {0: channel})
    except BaseException:  # Ctrl-C, too: rank 0 sees at once that this worker has left
        channel.close()
        raise


def _hear_answer(
    channel: Channel, address: tuple[str, int], config: RunConfig, own: Process, deadline: float
) -> dict[int, Process]:
    """Return the processes of all ranks, when rank 0 has named them."""
    _announce(channel, config, own)
    # Rank 0 answers when all have connected, or after its own --join_seconds.
    latest = max(time.monotonic() + 1, deadline) + ANSWER_SECONDS
    messages = channel.receive(GREETING_SECONDS)
    if not (messages or channel.has_left):
        waits = f"no answer from {address[0]}:{address[1]} yet; perhaps {IN_USE}; still waiting"
        print(f"rank {config.rank}: {waits}", file=sys.stderr, flush=True)
    while not (messages and "problem" in messages[-1]):
        if channel.has_left:
            raise OtherRankError(f"rank {config.rank}: rank 0 exited before all workers had connected; see its output")
        if time.monotonic() > latest:
            raise InputError(
                f"rank {config.rank}: no answer from {address[0]}:{address[1]}; {IN_USE}: choose another --master_port"
            )
        messages += channel.receive(latest - time.monotonic())
    answer = messages[-1]
    if "processes" not in answer:  # this rank was refused, and the others still wait
        raise InputError(answer["problem"])
    if answer["problem"]:
        raise OtherRankError(f"rank 0 says: {answer['problem']}")
    return {int(rank): Process(**process) for rank, process in answer["processes"].items()}


def _connect(address: tuple[str, int], config: RunConfig, deadline: float) -> socket.socket:
    reason: OSError = TimeoutError("no answer")
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(address, timeout=max(0.1, min(5.0, deadline - time.monotonic())))
        except OSError as error:
            reason = error  # rank 0 may simply not have started yet
            time.sleep(0.1)
    raise InputError(
        f"rank {config.rank} could not reach rank 0 at {address[0]}:{address[1]} within {config.join_seconds:g} s "
        f"({reason.strerror or reason}); check that rank 0 is running and that both use the same --master_ip "
        "and --master_port"
    )
