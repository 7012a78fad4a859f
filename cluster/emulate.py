"""Emulates CloudLab nodes on one machine: network namespaces on a bridge, with links as slow as real ones.

    python -m cluster.emulate --nodes 4 --rate 1gbit -- \
        python task2b_allreduce/run_glue.py --master_ip 10.10.1.1 --master_port 6585 --world_size 4 --local_rank {rank}

The command runs unchanged on each node, with {rank} replaced. Node r is called node{r} and has one interface, eth0,
with the address 10.10.1.{r+1}. It needs no root access if the system allows user namespaces; otherwise use sudo.
Nothing is left behind, no matter how the program ends: everything is in separate namespaces, which the kernel removes
with their last process. No maintained library was found that does this.
"""

import argparse
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cluster.guard import die_with_parent, exit_code
from cluster.launch import GUARD
from cluster.supervise import Command, supervise
from common.errors import InputError, exit_on_input_error
from common.flags import burst_bytes, link_rate

SUBNET = "10.10.1"
CONTROL = "172.16.1"
MAX_NODES = 64
# The machine's own choice may be BBR. With it, the stages of a pipeline at times stood still for a tenth of a second.
CONGESTION = "congctl reno"
QUEUE = "50ms"  # how much a port may have waiting before it drops packets, as time at the link's rate
INSIDE = "COS598D_EMULATE_INSIDE"  # set where the namespaces are already there


@dataclass(frozen=True)
class Plan:
    """The network as data: `rate` in tc's words (1gbit) or none, `delay` one way from node to node (5ms) or nothing.

    `control`: every node also has an interface that training must not use. It is not connected, but it counts bytes.
    """

    nodes: int = 4
    rate: str = "1gbit"
    delay: str = ""
    control: bool = False

    def address(self, node: int) -> str:
        return f"{SUBNET}.{node + 1}"


def commands(plan: Plan) -> list[list[str]]:
    """Return the commands that build the plan's network in new namespaces, in order."""
    made = [words("ip link add lan type bridge"), words("ip link set lan up")]
    for node in range(plan.nodes):
        name, port, inside = f"node{node}", f"port{node}", f"ip -netns node{node}"
        made += [
            words(f"ip netns add {name}"),
            words(f"ip link add {port} type veth peer name eth0 netns {name}"),
            words(f"ip link set {port} master lan up"),
            words(f"{inside} address add {plan.address(node)}/24 dev eth0"),
            words(f"{inside} link set lo up"),
            words(f"{inside} link set eth0 up"),
            words(f"{inside} route replace {SUBNET}.0/24 dev eth0 src {plan.address(node)} {CONGESTION}"),
        ]
        # A qdisc shapes what leaves an interface. Both ends, or a node would receive from all others at once.
        made += shaping(f"tc -netns {name}", "eth0", plan.rate, plan.delay)
        made += shaping("tc", port, plan.rate, "")
        if plan.control:
            made += control_network(inside, node)
    return made


def control_network(inside: str, node: int) -> list[list[str]]:
    """Return the commands for a second interface with the default route, as on CloudLab; it sends nothing."""
    return [
        words(f"ip link add control{node} type veth peer name control netns node{node}"),
        words(f"ip link set control{node} addrgenmode none up"),
        words(f"{inside} link set control addrgenmode none"),
        words(f"{inside} address add {CONTROL}.{node + 1}/24 dev control"),
        words(f"{inside} link set control up"),
        words(f"{inside} route add default dev control"),
    ]


def shaping(tc: str, device: str, rate: str, delay: str) -> list[list[str]]:
    """Limit the traffic out of `device` to `rate`, and delay it by `delay`."""
    made = []
    if rate != "none":
        burst = burst_bytes(bits_per_second(rate))  # how far a link may run ahead
        made.append(words(f"{tc} qdisc add dev {device} root handle 1: tbf rate {rate} burst {burst} latency {QUEUE}"))
    if delay:
        where = "root" if rate == "none" else "parent 1:"
        made.append(words(f"{tc} qdisc add dev {device} {where} netem delay {delay} limit 100000"))
    return made


def node_command(node: int, command: list[str]) -> list[str]:
    """Return `command` for a node, with its network and its host name (Gloo finds its own address by that)."""
    name_it = f'hostname node{node}; exec "$@"'
    return [*words(f"ip netns exec node{node} unshare --uts sh -c"), name_it, "sh", *command]


def rank_command(plan: Plan, rank: int, command: list[str]) -> Command:
    """Return the user's command for one rank, with its guard."""
    guard = [sys.executable, "-I", str(GUARD), "--share", str(plan.nodes), "--"]
    own = [word.replace("{rank}", str(rank)) for word in command]
    return Command(node_command(rank, [*guard, *own]), node=f"node{rank}")


def on_nodes(nodes: int, rate: str, command: list[str]) -> list[str]:
    """Return the command that runs a task script on emulated nodes, with one rank on each."""
    place = ["--master_ip", f"{SUBNET}.1", "--world_size", str(nodes), "--local_rank", "{rank}"]
    return [sys.executable, "-m", "cluster.emulate", "--nodes", str(nodes), "--rate", rate, "--", *command, *place]


def bits_per_second(rate: str) -> float:
    """Return a rate in tc's notation as a number; raises InputError."""
    try:
        return link_rate(rate)
    except argparse.ArgumentTypeError as error:
        raise InputError(f"--rate: {error}; none is a link without a limit") from None


def words(line: str) -> list[str]:
    return line.split()


# ----------------------------------------------------------------------------------- outside the namespaces


def namespaces() -> list[str]:
    """Return the command that starts a program in new namespaces; they end with it, and it ends with its parent."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, *words("--net --mount --pid --fork --kill-child --mount-proc")]


def run_inside(argv: list[str], interactive: bool) -> int:
    """Run this program again in namespaces, and stop it with this one; nothing remains, even after kill -9."""
    command = [*namespaces(), sys.executable, "-m", "cluster.emulate", *argv]
    child = subprocess.Popen(
        command,
        stdin=None if interactive else subprocess.PIPE,  # closed to say: stop
        start_new_session=not interactive,  # Ctrl-C reaches only us, but a shell needs its terminal
        preexec_fn=die_with_parent,
        # GPUs would reach each other past the links, and NCCL refuses several ranks on one.
        env=os.environ | {INSIDE: "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    received: list[int] = []

    def stop(number: int, _frame) -> None:
        received.append(number)
        if child.stdin:
            child.stdin.close()
        elif number != signal.SIGINT:  # Ctrl-C in a shell is the shell's own business
            child.kill()

    for wanted in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(wanted) is not signal.SIG_IGN:
            signal.signal(wanted, stop)
    code = exit_code(child.wait())
    return 128 + received[0] if received and not interactive else code


@functools.cache  # trying takes a tenth of a second
def why_not() -> str:
    """Return why this machine cannot emulate nodes, and what to do; empty if it can."""
    missing = [tool for tool in ("unshare", "ip", "tc") if not shutil.which(tool, path=search_path())]
    if missing:
        return f"{' and '.join(missing)} not found: sudo apt-get install iproute2 util-linux"
    attempt = subprocess.run(
        [*namespaces(), "ip", "link", "add", "lan", "type", "bridge"], capture_output=True, text=True
    )
    if attempt.returncode == 0:
        return ""
    reason = (attempt.stderr.strip().splitlines() or [f"exit code {attempt.returncode}"])[-1]
    if os.geteuid() == 0:
        return f"root is not allowed to create namespaces here ({reason}); start the container with --privileged"
    ubuntu, debian = "kernel.apparmor_restrict_unprivileged_userns=0", "kernel.unprivileged_userns_clone=1"
    return (
        f"this user is not allowed to create namespaces ({reason}); use sudo, or allow it with "
        f"`sudo sysctl -w {ubuntu}` (Ubuntu) or `sudo sysctl -w {debian}` (Debian)"
    )


def search_path() -> str:
    """PATH, with this Python first (`python` means this one) and the folders in which root finds ip and tc."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


# ------------------------------------------------------------------------------------ inside the namespaces


def build(plan: Plan) -> None:
    """Run the plan's commands; raises InputError with the command that failed and its message."""
    # `ip netns` keeps names in /run/netns, which belongs to the machine: cover it with a folder of our own.
    folder = Path("/run/netns" if Path("/run/netns").is_dir() else "/run")
    run(words(f"mount -t tmpfs tmpfs {folder}"))
    nodes = [(plan.address(node), f"node{node}") for node in range(plan.nodes)]
    # PyTorch asks for the name behind ::ffff:10.10.1.1, IPv6's view of 10.10.1.1, and warns if nobody knows it.
    names = "".join(f"{address} {name}\n::ffff:{address} {name}.mapped\n" for address, name in nodes)
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
    if Path("/etc/hosts").exists():
        run(words(f"mount --bind {folder}/hosts /etc/hosts"))
    for command in commands(plan):
        run(command)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    if "netem" in command:
        raise InputError(
            "--delay: this kernel has no netem (module sch_netem); leave --delay out, or use another kernel"
        )
    raise InputError(f"{shlex.join(command)} failed: {done.stderr.strip() or done.returncode}")


def inside(plan: Plan, shell: int | None, command: list[str]) -> int:
    """Build the network, then run the command on every node, or a shell on one."""
    build(plan)
    if shell is not None:
        return subprocess.run(node_command(shell, [os.environ.get("SHELL", "sh")])).returncode
    return supervise([rank_command(plan, rank, command) for rank in range(plan.nodes)], lifeline=sys.stdin.fileno())


# -------------------------------------------------------------------------------------------- command line


def parse(argv: list[str]) -> tuple[Plan, argparse.Namespace]:
    """Return the plan and the rest of the command line, after checks; raises InputError."""
    parser = argparse.ArgumentParser(prog="python -m cluster.emulate", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--nodes", type=int, default=4, help="number of nodes (4)")
    add("--rate", default=Plan.rate, help="rate of each link in each direction: 1gbit, 100mbit, none (%(default)s)")
    add("--delay", default="", help="latency from one node to another, for instance 1ms (needs netem)")
    add("--control", action="store_true", help="add a second interface to each node, which training must not use")
    add("--shell", metavar="NODE", help="open a shell on this node, for instance node2")
    add("command", nargs=argparse.REMAINDER, help="command to run on each node; {rank} is replaced")
    arguments = parser.parse_args(argv)
    arguments.command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not 1 <= arguments.nodes <= MAX_NODES:
        raise InputError(f"--nodes: expected 1 to {MAX_NODES}, got {arguments.nodes}")
    if arguments.rate != "none":
        bits_per_second(arguments.rate)
    if arguments.delay and not re.fullmatch(r"\d+(\.\d+)?(us|ms|s)", arguments.delay):
        raise InputError(f"--delay: expected a number with us, ms or s such as 1ms; got {arguments.delay!r}")
    names = [f"node{node}" for node in range(arguments.nodes)]
    if arguments.shell is not None and arguments.shell not in names:
        raise InputError(f"--shell: expected one of {', '.join(names)}; got {arguments.shell!r}")
    if not (arguments.command or arguments.shell):
        raise InputError("no command given; for instance: python -m cluster.emulate -- ping -c 3 10.10.1.1")
    arguments.shell = names.index(arguments.shell) if arguments.shell else None
    return Plan(arguments.nodes, arguments.rate, arguments.delay, arguments.control), arguments


def main() -> None:
    argv = sys.argv[1:]
    os.environ["PATH"] = search_path()
    plan, arguments = parse(argv)
    if os.environ.pop(INSIDE, "") and os.getpid() == 1:  # the first process of its own namespaces, and no other
        sys.exit(inside(plan, arguments.shell, arguments.command))
    elif reason := why_not():
        raise InputError(reason)
    else:
        sys.exit(run_inside(argv, interactive=arguments.shell is not None))


if __name__ == "__main__":
    exit_on_input_error(main)
