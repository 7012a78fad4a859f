"""Starts n workers with one command: on this machine, or on several over ssh.

    python -m cluster.launch --workers 4 -- task2a_gather_scatter/run_glue.py --max_steps 40
    python -m cluster.launch --hosts node0,node1,node2,node3 -- task2a_gather_scatter/run_glue.py --max_steps 40

Every worker gets the same command line plus --master_ip, --master_port, --world_size and its own --local_rank. You can
type the same commands into n terminals; --plan prints them. torchrun starts the same scripts, too, but takes 11 to 16 s
to say that a rank died (this launcher: 4 s), and blames an innocent rank when another one leaves out a call.
"""

import argparse
import os
import random
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.guard import exit_code
from cluster.supervise import Command, supervise
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT

GUARD = Path(__file__).with_name("guard.py")
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15"  # no questions; a dead connection is noticed in 45 s


@dataclass(frozen=True)
class Launch:
    """The workers to start; `script` is the part of the command that is the same on each worker."""

    script: list[str]
    workers: int
    hosts: list[str]  # empty: this machine
    ssh: list[str]
    folder: str  # the repository on the other nodes
    python: str  # Python on the other nodes


def parse(argv: list[str] | None = None) -> tuple[Launch, bool]:
    """Return the launch that the command line describes, and whether only to print it; raises InputError."""
    place = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag in ("--master_ip", "--master_port", "--world_size"):
        place.add_argument(flag, help="chosen automatically; may also be given after the script")
    parser = argparse.ArgumentParser(
        prog="python -m cluster.launch", description=__doc__, allow_abbrev=False, parents=[place]
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--workers", type=int, help="number of workers (default: one per host, or 4)")
    add_remote_flags(parser)
    add("--plan", action="store_true", help="print the commands instead of running them")
    add("--timeline", action="store_true", help="pass --timeline to the script, to see what each rank does")
    add("script", nargs=argparse.REMAINDER, help="the script and its flags")
    arguments = parser.parse_args(argv)
    script = arguments.script[1:] if arguments.script[:1] == ["--"] else arguments.script
    _, script = place.parse_known_args(script, arguments)  # what stands after the script counts
    if arguments.timeline and "--timeline" not in script:
        script = [*script, "--timeline"]
    hosts, ssh = split_hosts(arguments.hosts), shlex.split(arguments.ssh)
    _check_script(script, local=not hosts)
    given = vars(arguments)
    workers = _count_workers(arguments.workers, given.get("world_size"), hosts)
    # Another node's free ports cannot be seen from here; below 32768 no outgoing connection takes them.
    port = given.get("master_port") or (random.randrange(20000, 30000) if hosts else free_port())
    script += ["--master_ip", given.get("master_ip") or _address_of_rank_0(hosts, ssh)]
    script += ["--master_port", str(port), "--world_size", str(workers)]
    return Launch(script, workers, hosts, ssh, arguments.folder, arguments.python), arguments.plan


def add_remote_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where the nodes are, and what is there."""
    add = parser.add_argument
    add("--hosts", default="", help="nodes by name or address, separated by commas (default: this machine)")
    add("--ssh", default=SSH, help='command to reach the hosts, for instance "ssh -p 2222 -i key"')
    add("--folder", default=remote_folder(), help="folder of this repository on the nodes (%(default)s)")
    add("--python", default=remote_python(), help="Python on the nodes (%(default)s)")


def split_hosts(hosts: str) -> list[str]:
    """Return the hosts of --hosts; the first has rank 0."""
    return [host.strip() for host in hosts.split(",") if host.strip()]


def commands(launch: Launch) -> list[Command]:
    """Return one command per rank, in order; the ranks are distributed over the hosts as evenly as possible."""
    if not launch.hosts:
        guard = [sys.executable, "-I", str(GUARD), "--share", str(launch.workers), "--", sys.executable]
        return [Command([*guard, *launch.script, "--local_rank", str(rank)]) for rank in range(launch.workers)]
    hosts = [launch.hosts[rank * len(launch.hosts) // launch.workers] for rank in range(launch.workers)]
    return [_remote_command(launch, rank, host, hosts.count(host)) for rank, host in enumerate(hosts)]


def run_silently(what: str, command: list[str], threads: int | None = None) -> None:
    """Run a command whose output nobody needs. Raises InputError with its first error if it fails.

    threads: of torch, in each process; None: as many as it would use by itself.
    """
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    pipe = subprocess.PIPE
    process = subprocess.run(command, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    if process.returncode:
        lines = process.stdout.strip().splitlines() or ["nothing"]
        error = next((line for line in lines if "error:" in line), lines[-1])
        raise InputError(f"{what} ended with exit code {process.returncode}: {error.replace('error: ', '', 1)}")


def free_port() -> int:
    """Return a free port. If another program takes it before rank 0 does, rank 0 reports this."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address_of(host: str, ssh: list[str]) -> str:
    """Return the address of a host as ssh and this machine's resolver know it; raises InputError."""
    shown = subprocess.run([*ssh, "-G", host], capture_output=True, text=True).stdout
    names = [line.split()[1] for line in shown.splitlines() if line.startswith("hostname ")]
    name = names[0] if names else host.rpartition("@")[2]
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise InputError(f"--hosts: {name} cannot be resolved here ({error}); add --master_ip ADDRESS") from error


def _remote_command(launch: Launch, rank: int, host: str, share: int) -> Command:
    guard = [launch.python, "-I", "cluster/guard.py", "--share", str(share), "--", launch.python]
    words = shlex.join([*guard, *launch.script, "--local_rank", str(rank)])
    return Command([*launch.ssh, host, f"cd {shlex.quote(launch.folder)} && exec {words}"], node=host)


def _address_of_rank_0(hosts: list[str], ssh: list[str]) -> str:
    """Return the address of the first host; raises InputError if the others cannot reach it."""
    address = address_of(hosts[0], ssh) if hosts else "127.0.0.1"
    if address.startswith("127.") and len({host.rpartition("@")[2] for host in hosts}) > 1:
        raise InputError(
            f"--hosts: {hosts[0]} resolves to {address}, which only that node can reach; add --master_ip ADDRESS"
        )
    return address


def _count_workers(asked: int | None, world_size: str | None, hosts: list[str]) -> int:
    if world_size is not None and not world_size.isdecimal():
        raise InputError(f"--world_size: expected a number of workers, got {world_size!r}")
    workers = asked if asked is not None else int(world_size) if world_size else len(hosts) or 4
    if world_size is not None and workers != int(world_size):
        raise InputError(f"--workers {workers} and --world_size {world_size} differ; leave --world_size out")
    if workers < max(1, len(hosts)):
        raise InputError(f"--workers: expected at least {max(1, len(hosts))} (one per host), got {workers}")
    return workers


def _check_script(script: list[str], local: bool) -> None:
    if not script:
        raise InputError("no script given; for instance: python -m cluster.launch --workers 4 -- cluster/hello.py")
    if Path(script[0]).name.startswith("python"):
        raise InputError(f"leave out {script[0]!r}: the launcher starts Python itself; begin with the script")
    if local and script[0] != "-m" and not Path(script[0]).is_file():
        raise InputError(f"there is no script {script[0]} in {Path.cwd()}; give its path relative to this folder")
    if any(word.partition("=")[0] == "--local_rank" for word in script):
        raise InputError("leave out --local_rank: the launcher gives each worker its own")


def remote_folder() -> str:
    """Return this repository's path, relative to the home folder if it is inside it.

    ssh starts in the home folder, whose path may differ between nodes.
    """
    return str(ROOT.relative_to(Path.home())) if ROOT.is_relative_to(Path.home()) else str(ROOT)


def remote_python() -> str:
    """Return the path of this Python if it is inside the repository, as .venv is; it is the same on the nodes."""
    here = Path(sys.executable)
    return str(here.relative_to(ROOT)) if here.is_relative_to(ROOT) else "python3"


def main() -> None:
    launch, only_print = parse()
    if only_print:
        for command in commands(launch):
            print(shlex.join(command.words))
        return
    code = supervise(commands(launch))
    if code == 255 and launch.hosts:
        test = shlex.join([*launch.ssh, launch.hosts[0], "true"])
        print(f"exit code 255 comes from ssh itself; test the connection with: {test}", file=sys.stderr)
    sys.exit(exit_code(code))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    exit_on_input_error(main)
