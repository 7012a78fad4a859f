"""Checks this machine, or all nodes, before a long run. Each line is `ok` or says what to do.

    python -m cluster.doctor
    python -m cluster.doctor --hosts node0,node1,node2,node3 --master_ip 10.10.1.1

The last line is a summary in JSON; the exit code is 0 if there is nothing to fix.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from cluster.emulate import why_not
from cluster.launch import add_remote_flags, address_of, split_hosts
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from common.workers.machine import interfaces, nvidia_driver, own_address

PACKAGES = ("torch", "transformers", "datasets", "numpy", "scikit-learn", "tqdm")
DISK_GB, MEMORY_GB = 10, 4  # what the course needs with the embedded sample, see README.md
BERT_BASE_GB = 16  # of memory, to fine-tune BERT-base: it takes 12.3 GB
SLOW_MBIT = 500.0
EXPERIMENT_NETWORK = "10.10.1."  # the nodes' own network on CloudLab, see README.md


class Finding(NamedTuple):
    """One line of the report. `level`: ok, fix (a run would fail) or note (it would not)."""

    level: str
    text: str
    todo: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.text}" + (f": {self.todo}" if self.todo else "")


def ok_or_fix(good: bool, text: str, todo: str) -> Finding:
    return Finding("ok", text) if good else Finding("fix", text, todo)


# --------------------------------------------------------------------------------------- of one node


def check_versions(installed: dict[str, str]) -> Finding:
    """Python and the packages; `installed` as versions() returns it."""
    text = ", ".join(f"{name} {number}" for name, number in installed.items())
    missing = [name for name, number in installed.items() if number == "missing"]
    old = tuple(int(part) for part in installed["Python"].split(".")[:2]) < (3, 11)
    todo = "install Python 3.11 or newer" if old else f"{', '.join(missing)} missing, run make setup"
    return ok_or_fix(not missing and not old, text, todo)


def check_disk(free_bytes: float) -> Finding:
    text = f"disk: {free_bytes / 1e9:.0f} GB free on the disk with the course ({DISK_GB} needed)"
    return ok_or_fix(free_bytes >= DISK_GB * 1e9, text, "free disk space, or clone to a larger disk")


def check_memory(total_bytes: float) -> Finding:
    size = round(total_bytes / 1e9)  # a machine sold with 4 GB reports a little less
    text, larger = f"memory: {size} GB", f"BERT-base at batch 64 needs {BERT_BASE_GB} GB"
    if MEMORY_GB <= size < BERT_BASE_GB:
        return Finding("note", text, f"enough for the embedded sample; {larger}")
    return ok_or_fix(size >= MEMORY_GB, text, f"use a machine with at least {MEMORY_GB} GB; {larger}")


def check_interface(master_ip: str, addresses: dict[str, str]) -> Finding:
    """Report which of this node's interfaces carries packets to the master; addresses: see machine.interfaces."""
    try:
        own = own_address(master_ip)
    except OSError as error:
        return Finding("fix", f"network: no route to {master_ip} ({error})", "check --master_ip and `ip address`")
    text = f"network: {master_ip} is reached through {addresses.get(own, 'unknown interface')} ({own})"
    better = [address for address in addresses if address.startswith(EXPERIMENT_NETWORK)]
    wrong = bool(better) and not own.startswith((EXPERIMENT_NETWORK, "127."))
    return ok_or_fix(not wrong, text, f"use the experiment network, --master_ip {EXPERIMENT_NETWORK}1; see README.md")


def check_port(master_ip: str, port: int) -> Finding:
    """Return whether rank 0 could listen on the port, on the node that has the master's address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((master_ip, port))
        except OSError as error:
            return Finding("fix", f"port {port} cannot be used ({error.strerror})", "choose another with --master_port")
    return Finding("ok", f"port {port} is free")


def check_emulation(reason: str) -> Finding:
    text = "emulated nodes: network namespaces and shaping"
    return Finding("note", f"{text} are not allowed here", reason) if reason else Finding("ok", f"{text} are allowed")


def check_gpu(driver: str, torch_build: str, gpus: int) -> Finding:
    """Report what each script will use. torch_build: torch's version and CUDA's, "" if torch was not asked."""
    if not driver:
        return Finding("ok", "GPUs: no NVIDIA driver; every script uses the CPU and gloo")
    text = f"GPUs: NVIDIA driver {driver}, {torch_build}, {gpus} for torch to use"
    if gpus == 0:
        why = "rm -r .venv; make setup" if torch_build.endswith("without CUDA") else "check nvidia-smi"
        return Finding("note", f"{text}; every script uses the CPU and gloo", why)
    count = f"up to {gpus} workers" if gpus > 1 else "one worker"
    threads = "on the GPUs" if gpus > 1 else "on the CPU (two GPUs needed)"
    return Finding("ok", f"{text}; {count} with NCCL, more with the CPU and gloo; the pipeline with threads {threads}")


def torch_on_gpus() -> tuple[str, int]:
    """Return torch's build and the number of GPUs that it can use, asked in a process of its own."""
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        return "torch cannot be imported", 0
    number, cuda, gpus = done.stdout.split()
    return f"torch {number} " + ("without CUDA" if cuda == "None" else f"for CUDA {cuda}"), int(gpus)


def versions() -> dict[str, str]:
    """Python's and the packages' versions, from their metadata: importing torch takes seconds."""
    installed = {"Python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "missing"
    return installed


def code_state(root: Path = ROOT) -> dict[str, str]:
    """Return the commit, and a digest of the course's code, including changes that are not committed."""
    digest = hashlib.sha256()
    packages = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]  # not .venv
    for path in sorted([*root.glob("*.py"), *(path for folder in packages for path in folder.rglob("*.py"))]):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    git = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {"commit": git.stdout.strip() or "none", "code": digest.hexdigest()[:12]}


def examine_node(master_ip: str, port: int) -> dict:
    """Return everything about the node on which this runs, ready for JSON."""
    addresses, driver = interfaces(), nvidia_driver()
    findings = [
        check_versions(versions()),
        check_disk(shutil.disk_usage(ROOT).free),
        check_memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        check_gpu(driver, *(torch_on_gpus() if driver else ("", 0))),
        check_interface(master_ip, addresses),
        check_emulation(why_not()),
    ]
    if master_ip in addresses or master_ip.startswith("127."):
        findings.append(check_port(master_ip, port))
    return {"findings": findings, "versions": versions(), "state": code_state()}


# ------------------------------------------------------------------------------------- of all together


def compare_nodes(nodes: dict[str, dict]) -> list[Finding]:
    """Same code and same packages everywhere? The first node is the reference."""
    findings = []
    for what, key, todo in (
        ("code", "state", "run git pull there, and copy changes that are not committed"),
        ("packages", "versions", "run make setup there"),
    ):
        first, *others = nodes
        differing = [name for name in others if nodes[name][key] != nodes[first][key]]
        text = f"{what}: the same on all {len(nodes)} nodes"
        if differing:
            parts = ", ".join(_difference(nodes[name][key], nodes[first][key], name) for name in differing)
            text = f"{what}: differs from {first}: {parts}"
        findings.append(ok_or_fix(not differing, text, todo))
    return findings


def _difference(here: dict[str, str], there: dict[str, str], name: str) -> str:
    return f"{name} has " + " and ".join(f"{key} {here[key]}" for key in here if here[key] != there[key])


def measure_bandwidth(workers: int, more: list[str]) -> Finding:
    """cluster.bandwidth between `workers` processes, started as the launcher starts any script."""
    command = [sys.executable, "-m", "cluster.launch", "--workers", str(workers), *more]
    command += ["--", "-m", "cluster.bandwidth"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=180)
    except subprocess.TimeoutExpired:
        return Finding("fix", "transfer: no result after 180 s", "check for a firewall between the nodes")
    figures = [line.partition("Mbit/s: ")[2] for line in done.stdout.splitlines() if "Mbit/s: " in line]
    if done.returncode or not figures:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding("fix", f"transfer between {workers} workers failed", f"{last} ({shlex.join(command)})")
    speed, on_this_machine = float(figures[0]), not more
    text = f"{workers} workers send to their neighbours at the same time: {speed:.0f} Mbit/s from each"
    todo = "slow for a cluster; check that --master_ip is on the fast network"
    return ok_or_fix(on_this_machine or speed > SLOW_MBIT, text, todo)


# ------------------------------------------------------------------------------------------ command line


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster.doctor", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add_remote_flags(parser)
    add("--master_ip", help="address of rank 0 (default: the first host's)")
    add("--master_port", type=int, default=6585, help="the port you will use (%(default)s)")
    add("--json", action="store_true", help=argparse.SUPPRESS)  # one node, asked by another
    return parser.parse_args(argv)


def ask_hosts(config: argparse.Namespace, hosts: list[str]) -> dict[str, dict]:
    """Run this program on every host and read what it found; raises InputError with ssh's message if that fails."""
    remote = ["-m", "cluster.doctor", "--json", "--master_ip", config.master_ip]
    words = shlex.join([config.python, *remote, "--master_port", str(config.master_port)])
    nodes = {}
    for host in hosts:
        command = [*shlex.split(config.ssh), host, f"cd {shlex.quote(config.folder)} && {words}"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise InputError(f"--hosts: {host} does not answer ({last}); try: {shlex.join(command)}")
        nodes[host] = json.loads(done.stdout)
    return nodes


def report(config: argparse.Namespace) -> int:
    """Print all findings as they come, then their number by level; 0 if there is nothing to fix."""
    hosts = split_hosts(config.hosts)
    config.master_ip = config.master_ip or (address_of(hosts[0], shlex.split(config.ssh)) if hosts else "127.0.0.1")
    nodes = ask_hosts(config, hosts) if hosts else {"": examine_node(config.master_ip, config.master_port)}
    findings = [
        Finding(level, f"{name} {text}".strip(), todo)
        for name, node in nodes.items()
        for level, text, todo in node["findings"]
    ]
    findings += compare_nodes(nodes) if hosts else []
    print("\n".join(map(str, findings)), flush=True)  # what follows takes some seconds
    if len(hosts) != 1 and "missing" not in nodes[next(iter(nodes))]["versions"]["torch"]:
        reach = ["--hosts", config.hosts, "--master_ip", config.master_ip, "--ssh", config.ssh]
        reach += ["--folder", config.folder, "--python", config.python]
        findings.append(measure_bandwidth(len(hosts) or 2, reach if hosts else []))
        print(findings[-1])
    counts = {level: sum(finding.level == level for finding in findings) for level in ("ok", "fix", "note")}
    print(json.dumps(counts))
    return int(counts["fix"] > 0)


def main() -> None:
    config = parse()
    if config.json:
        print(json.dumps(examine_node(config.master_ip, config.master_port)))
    else:
        sys.exit(report(config))


if __name__ == "__main__":
    exit_on_input_error(main)
