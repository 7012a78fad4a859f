"""Before joining the process group, every worker announces itself, so that a mistake is reported and does not hang.

The first worker listens on master_ip:master_port, the others connect and send one line of JSON. It answers each with
"ok" or with what is wrong, closes, and leaves the port to the lesson's own init_process_group.
"""

import contextlib
import json
import os
import socket
import time
from io import TextIOWrapper

from common.config import RunConfig
from common.errors import InputError


def call_the_roll(config: RunConfig) -> None:
    """Return when all workers have connected. Otherwise raise InputError on every worker, with the reason."""
    if config.world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return  # torchrun counts its workers itself, and its own store listens on the port
    deadline = time.monotonic() + config.join_seconds
    (_answer_all if config.rank == 0 else _report_in)(config, deadline)


def _answer_all(config: RunConfig, deadline: float) -> None:
    """On rank 0: wait for the others, then send the result to all of them."""
    there: dict[int, TextIOWrapper] = {}
    wrong = ""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_listen(config))
        while len(there) < config.world_size - 1 and not wrong:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, (address, _) = server.accept()
            except TimeoutError:
                missing = [str(rank) for rank in range(1, config.world_size) if rank not in there]
                wrong = (
                    f"rank {', '.join(missing)} of {config.world_size} did not connect within "
                    f"{config.join_seconds:g} s; start every worker with the same --master_ip, --master_port "
                    "and --world_size"
                )
                break
            line = stack.enter_context(connection).makefile("rw", encoding="utf-8")
            connection.settimeout(5)
            wrong = _check_in(line, address, config, there)
        server.close()  # before the answer: what connects from now on is meant for the lesson's own store
        for line in there.values():
            with contextlib.suppress(OSError):
                line.write(json.dumps({"wrong": wrong}) + "\n")
                line.flush()
    if wrong:
        raise InputError(wrong)


def _check_in(line: TextIOWrapper, address: str, config: RunConfig, there: dict[int, TextIOWrapper]) -> str:
    """Read one worker's line; return what is wrong with it, or the empty string."""
    try:
        who = json.loads(line.readline(1000))
        rank, world_size, task = who["rank"], who["world_size"], who["task"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # not one of ours, for instance a port scan: continue to wait
    wrong = ""
    if world_size != config.world_size:
        wrong = f"rank {rank} at {address} has --world_size {world_size}, rank 0 has {config.world_size}"
    elif task != config.task:
        wrong = f"rank {rank} at {address} runs {task}, rank 0 runs {config.task}"
    elif rank in there or rank == 0:
        wrong = f"rank {rank} was started twice (the second time at {address}); give every worker its own --local_rank"
    there[-1 if wrong else rank] = line  # the wrong one gets the message as well
    return wrong


def _listen(config: RunConfig) -> socket.socket:
    try:
        return socket.create_server((config.master_ip, config.master_port), backlog=config.world_size)
    except OSError as error:
        place = f"{config.master_ip}:{config.master_port}"
        hint = "another program, or an earlier run, uses it: choose another --master_port"
        if "assign" in str(error) or isinstance(error, socket.gaierror):
            hint = "--master_ip must be an address of the machine on which rank 0 runs"
        raise InputError(f"rank 0 cannot listen on {place} ({error.strerror or error}); {hint}") from None


def _report_in(config: RunConfig, deadline: float) -> None:
    """On any other rank: connect to rank 0, announce this rank, wait for the answer."""
    with _connect(config, deadline) as connection, connection.makefile("rw", encoding="utf-8") as line:
        line.write(json.dumps({"rank": config.rank, "world_size": config.world_size, "task": config.task}) + "\n")
        line.flush()
        # Rank 0 answers when all have come; it waits no longer than its own --join_seconds, and a little more here.
        connection.settimeout(max(1.0, deadline - time.monotonic()) + 10)
        try:
            answer = json.loads(line.readline(10_000))
        except (OSError, ValueError):
            raise InputError(
                f"rank {config.rank}: rank 0 exited before all workers had connected; see its output"
            ) from None
    if answer["wrong"]:
        raise InputError(f"rank 0 says: {answer['wrong']}")


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
        f"rank {config.rank} cannot reach rank 0 at {place[0]}:{place[1]} within {config.join_seconds:g} s "
        f"({reason.strerror or reason}); is it running, and are --master_ip and --master_port those of rank 0?"
    )
