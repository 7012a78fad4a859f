"""cluster.doctor, each check from both sides and over several hosts; the CloudLab profile and the sbatch file."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from cluster import cloudlab_profile, doctor
from cluster.launch import free_port
from common.paths import ROOT
from common.workers.machine import interfaces
from staff.tests.cluster.started_processes import run
from staff.tests.common import rank_stubs

ssh = rank_stubs.ssh  # a fixture
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nodes are Linux machines")

GOOD = {"Python": "3.12.3", "torch": "2.13.0", "transformers": "5.23.0"}


@pytest.mark.parametrize(("finding", "level", "words"), [
    (doctor.check_disk(10e9), "ok", "10 GB free"),
    (doctor.check_disk(9.9e9), "fix", "free disk space"),
    (doctor.check_memory(16e9), "ok", "16 GB"),
    (doctor.check_memory(12e9), "note", "12 GB: enough for the embedded sample; BERT-base at batch 64 needs 16 GB"),
    (doctor.check_memory(2e9), "fix", "use a machine with at least 4 GB"),
    (doctor.check_versions(GOOD), "ok", "torch 2.13.0"),
    (doctor.check_versions(GOOD | {"torch": "missing"}), "fix", "torch missing, run make setup"),
    (doctor.check_versions(GOOD | {"Python": "3.9.2"}), "fix", "install Python 3.11 or newer"),
    (doctor.check_emulation(""), "ok", "are allowed"),
    (doctor.check_emulation("use sudo"), "note", "are not allowed here: use sudo"),
    (doctor.check_interface("127.0.0.1", interfaces()), "ok", "127.0.0.1 is reached through lo (127.0.0.1)"),
])  # fmt: skip
def test_a_check_says_ok_or_what_to_do(finding, level, words):
    assert finding.level == level
    assert words in str(finding)


def test_a_port_is_free_or_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = doctor.check_port("127.0.0.1", port)

    assert finding.level == "fix" and "--master_port" in finding.todo
    assert doctor.check_port("127.0.0.1", port).level == "ok"


def test_the_control_network_is_refused_where_there_is_an_experiment_network():
    control = next((address for address, name in interfaces().items() if name != "lo"), None)
    if control is None:
        pytest.skip("this machine has no interface but lo")

    with_choice = doctor.check_interface(control, {control: "eth0", "10.10.1.2": "eth1"})

    assert with_choice.level == "fix" and "--master_ip 10.10.1.1" in with_choice.todo
    assert doctor.check_interface(control, {control: "eth0"}).level == "ok"


def test_a_node_with_other_code_or_packages_is_named():
    def node(code="0123456789ab", torch="2.13.0"):
        return {"state": {"commit": "27db173", "code": code}, "versions": GOOD | {"torch": torch}}

    nodes = {"node0": node(), "node1": node(), "node2": node(code="f" * 12), "node3": node(torch="2.9.0")}

    code, packages = map(str, doctor.compare_nodes(nodes))

    assert code.startswith("fix   code: differs from node0: node2 has code ffffffffffff: run git pull")
    assert packages.startswith("fix   packages: differs from node0: node3 has torch 2.9.0: run make setup there")


def test_a_changed_file_of_the_course_is_another_state_and_an_installed_package_is_not(tmp_path):
    def changed(name: str) -> bool:
        before = doctor.code_state(tmp_path)["code"]
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("changed = True\n")
        return doctor.code_state(tmp_path)["code"] != before

    names = ("submit.py", "common/config.py", "common/workers/machine.py", ".venv/lib/torch.py", "common/README.md")
    assert [changed(name) for name in names] == [True, True, True, False, False]


@pytest.mark.medium
@pytest.mark.parametrize("hosts", [0, 2])
def test_this_machine_or_all_hosts_are_examined_compared_and_measured(ssh, hosts):
    reach = ["--hosts", "127.0.0.1,localhost", "--ssh", ssh, "--python", sys.executable] if hosts else []

    result = run("-m", "cluster.doctor", *reach, "--master_port", str(free_port()))

    *lines, last = result.stdout.splitlines()
    counts = json.loads(last)
    assert {level: sum(line.startswith(f"{level} ") for line in lines) for level in counts} == counts, result.stderr
    assert result.returncode == (1 if counts["fix"] else 0)
    assert sum(" network: 127.0.0.1 is reached through lo" in line for line in lines) == (hosts or 1)
    assert any("2 workers send to their neighbours at the same time: " in line for line in lines)
    for what in ("code", "packages") if hosts else ():
        assert f"ok    {what}: the same on all 2 nodes" in lines


@pytest.mark.medium
def test_a_host_that_does_not_answer_is_one_line():
    result = run("-m", "cluster.doctor", "--hosts", "127.0.0.1", "--ssh", f"ssh -o BatchMode=yes -p {free_port()}")

    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "error: --hosts: 127.0.0.1 does not answer" in result.stderr and "Connection refused" in result.stderr


def test_the_rspec_asks_for_nodes_on_an_experiment_lan_that_set_themselves_up():
    repository = "https://example.org/it's mine.git"
    command = cloudlab_profile.boot_command(repository)
    assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0
    assert "'https://example.org/it'\"'\"'s mine.git'" in command
    pg = pytest.importorskip("geni.rspec.pg", reason="geni-lib is not a dependency: pip install geni-lib six")

    request = pg.Request()
    cloudlab_profile.describe(request, pg, SimpleNamespace(nodes=4, hardware="c220g5", repository=repository))

    rspec = ElementTree.fromstring(request.toXMLString())
    nodes = rspec.findall("{*}node")

    def each(tag: str, attribute: str) -> list[str]:
        return [element.get(attribute, "") for node in nodes for element in node.findall(".//{*}" + tag)]

    assert [node.get("client_id") for node in nodes] == ["node0", "node1", "node2", "node3"]
    assert each("ip", "address") == [f"10.10.1.{number}" for number in (1, 2, 3, 4)]
    assert each("hardware_type", "name") == ["c220g5"] * 4
    assert each("execute", "command") == [command] * 4
    assert len(rspec.findall("{*}link/{*}interface_ref")) == 4


def test_the_sbatch_file_gives_each_task_the_course_s_flags(tmp_path):
    stand_ins = {
        "scontrol": "echo node7; echo node8",
        "srun": 'for SLURM_PROCID in 0 1; do export SLURM_PROCID; "${@:2}"; done',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "show.py").write_text("import sys; print(*sys.argv[1:], sep='|')")
    slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "12345"}
    slurm |= {"SLURM_CPUS_PER_TASK": "8", "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": sys.executable}

    def sbatch(*words):
        command = ["bash", ROOT / "cluster/course.sbatch", *words]
        return subprocess.run(command, env=os.environ | slurm, capture_output=True, text=True, cwd=ROOT)

    result = sbatch(tmp_path / "show.py", "--seed", "a b")

    same = "--seed|a b|--master_ip|node7|--master_port|22345|--world_size|2|--local_rank"
    assert result.stdout.splitlines() == [f"{same}|{rank}" for rank in range(2)], result.stderr
    assert (sbatch().returncode, sbatch().stderr.count("error: no script given")) == (2, 1)
