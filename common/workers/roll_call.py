"""Before joining the process group, every worker announces itself, so that a mistake is reported and does not hang.

The first worker listens on master_ip:master_port, the others connect and send one line of JSON. It greets each, tells
all of them when all are there or what is wrong, closes, and leaves the port to the lesson's own init_process_group.
"""

import contextlib
import errno
import json
import os
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass

from common.config import RunConfig
from common.errors import InputError
from common.workers.exchange import Process
from common.workers.rows import RANK_0_LEFT, RANK_0_SAYS

GREETING_SECONDS = 2.0  # rank 0 greets at once; a run that has begun never does
ANSWER_SECONDS = 10.0  # how much longer than --join_seconds another rank waits for rank 0's answer
IN_USE = "a run that has begun, or another program, uses this port"


# What must be the same on all workers (the timeline communicates, too), and how a difference is said.
COMPARED = {"world_size": "has --world_size", "task": "runs", "timeline": "has --timeline", "backend": "uses"}


@dataclass(frozen=True)
class Caller:
    """A worker that has announced itself, and the connection on which it waits for the answer."""

    connection: socket.socket
    process: Process

    def send(self, **words: object) -> None:
        """Send the words; a worker that has left cannot receive them, and says itself why it left."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(words).encode() + b"\n")

    def has_left(self) -> bool:
        """Return whether its end is closed: stopped by Ctrl-C, for instance."""
        try:
            says_something = select.select([self.connection], [], [], 0)[0]
            return bool(says_something) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True


def call_the_roll(config: RunConfig) -> None:
    """Return when all workers have connected. Otherwise raise InputError on every worker, with the reason."""
    if config.world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return  # torchrun counts its workers itself, and its own store listens on the port
    try:
        socket.getaddrinfo(config.master_ip, None)
    except socket.gaierror as error:
        raise InputError(
            f"--master_ip: {config.master_ip} does not resolve on this machine ({error.strerror}); give rank 0's IP "
            "address, or a name that every machine knows"
        ) from None
    deadline = time.monotonic() + config.join_seconds
    (_answer_all if config.rank == 0 else _report_in)(config, deadline)


def _answer_all(config: RunConfig, deadline: float) -> None:
    """On rank 0: wait for the others, then send the result to all of them."""
    there: dict[int, Caller] = {}
    twice: list[str] = []
    wrong = ""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(config))
        while not wrong:
            if len(there) == config.world_size - 1:
                there = {rank: caller for rank, caller in there.items() if not caller.has_left()}
            if len(there) == config.world_size - 1:
                break  # all are there, and nobody was stopped while the others were waited for
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = [str(rank) for rank in range(1, config.world_size) if rank not in there]
                wrong = (
                    f"rank {', '.join(missing)} of {config.world_size} did not connect within "
                    f"{config.join_seconds:g} s; start every worker with the same --master_ip, --master_port "
                    f"and --world_size{''.join(f' ({one})' for one in twice)}"
                )
                break
            connection.settimeout(5)
            wrong = _check_in(connection, config, there, twice)
        server.close()  # before the answer: what connects from now on is meant for the lesson's own store
        for caller in there.values():
            caller.send(wrong=wrong)
    if wrong:
        raise InputError(wrong)


def _check_in(connection: socket.socket, config: RunConfig, there: dict[int, Caller], twice: list[str]) -> str:
    """Read one worker's line; return what is wrong with the whole run, "" if nothing is.

    If a rank was started twice, only the second process is refused.
    """
    try:
        who = json.loads(connection.makefile("rb").readline(1000))
        rank, caller = int(who["rank"]), Caller(connection, Process(**who["process"]))
        differing = [name for name in COMPARED if who[name] != getattr(config, name)]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # not one of ours, for instance a port scan: continue to wait
    if rank == 0 or (rank in there and not there[rank].has_left()):
        first = Process() if rank == 0 else there[rank].process
        caller.send(wrong=f"rank {rank} has already joined ({first}): start this worker with another --local_rank")
        twice.append(f"rank {rank} was started twice, the second time as {caller.process}")
        print(f"{twice[-1]}: refused; still waiting for the others", file=sys.stderr, flush=True)
        return ""
    caller.send(greeting="wait for the others")
    there[rank] = caller  # the wrong one gets the message as well
    if not differing:
        return ""
    name = differing[0]
    has, advice = COMPARED[name], "; use --no_cuda everywhere" if name == "backend" else ""
    return f"rank {rank} ({caller.process}) {has} {who[name]}, rank 0 {has} {getattr(config, name)}{advice}"


def _listen(config: RunConfig) -> socket.socket:
    place = (config.master_ip, config.master_port)
    try:
        return socket.create_server(place, backlog=config.world_size)
    except OSError as error:
        answer = ""
        if error.errno == errno.EADDRINUSE:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                with socket.create_connection(place, timeout=GREETING_SECONDS) as connection:
                    answer = _announce(connection, config)  # of a rank 0 that waits for its workers
        if answer:
            raise InputError(answer) from None
        hint = f"{IN_USE}: choose another --master_port"
        if "assign" in str(error):
            hint = "--master_ip must be an address of the machine on which rank 0 runs"
        raise InputError(f"rank 0 cannot listen on {place[0]}:{place[1]} ({error.strerror or error}); {hint}") from None


def _announce(connection: socket.socket, config: RunConfig) -> str:
    """Send this worker's line; return what rank 0 answers. Raises OSError or ValueError if that is no answer."""
    who = {name: getattr(config, name) for name in ("rank", *COMPARED)}
    with connection.makefile("rw", encoding="utf-8") as line:
        line.write(json.dumps({**who, "process": asdict(Process())}) + "\n")
        line.flush()
        if config.rank and not select.select([connection], [], [], GREETING_SECONDS)[0]:
            place = f"{config.master_ip}:{config.master_port}"
            waits = f"rank {config.rank}: no answer from {place} yet; perhaps {IN_USE}; still waiting"
            print(waits, file=sys.stderr, flush=True)
        answer = json.loads(line.readline(10_000))
        return (answer if "wrong" in answer else json.loads(line.readline(10_000)))["wrong"]


def _report_in(config: RunConfig, deadline: float) -> None:
    """On any other rank: connect to rank 0, announce this rank, wait for the answer."""
    with _connect(config, deadline) as connection:
        # Rank 0 answers when all have connected, or after its own --join_seconds.
        connection.settimeout(max(1.0, deadline - time.monotonic()) + ANSWER_SECONDS)
        try:
            wrong = _announce(connection, config)
        except TimeoutError:
            place = f"{config.master_ip}:{config.master_port}"
            raise InputError(
                f"rank {config.rank}: no answer from {place}; {IN_USE}: choose another --master_port"
            ) from None
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"rank {config.rank}: {RANK_0_LEFT}; see its output") from None
    if wrong:
        raise InputError(wrong if "has already joined" in wrong else f"{RANK_0_SAYS} {wrong}")


def _connect(config: RunConfig, deadline: float) -> socket.socket:
    place = (config.master_ip, config.master_port)
    reason: OSError = TimeoutError("no answer")
    while time.monotonic() < deadline:
        try:
            return socket.create_connection(place, timeout=max(0.1, min(5.0, deadline - time.monotonic())))
        except OSError as error:
            reason = error  # rank 0 may simply not have started yet
            time.sleep(0.1)
    raise InputError(
        f"rank {config.rank} could not reach rank 0 at {place[0]}:{place[1]} within {config.join_seconds:g} s "
        f"({reason.strerror or reason}); check that rank 0 is running and that both use the same --master_ip "
        "and --master_port"
    )
