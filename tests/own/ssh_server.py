"""The fixture `ssh`: a real sshd on loopback that this user runs for the tests."""

import getpass
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from cluster.launch import free_port
from tests.own.started_processes import wait_for


@pytest.fixture(scope="session")
def ssh(tmp_path_factory) -> Iterator[str]:
    """An sshd of our own on loopback, run by this user; yields the command that reaches it."""
    sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if not sshd or not shutil.which("ssh-keygen"):
        pytest.skip("needs an sshd to connect to: apt-get install openssh-server")
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # sshd refuses to start as root without it
    folder, port = tmp_path_factory.mktemp("sshd"), free_port()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 50\n"
    )
    with subprocess.Popen([sshd, "-D", "-e", "-f", folder / "config"], stderr=subprocess.DEVNULL) as server:
        reach = f"ssh -p {port} -i {folder}/user -l {getpass.getuser()} -o BatchMode=yes -o IdentitiesOnly=yes "
        reach += f"-o StrictHostKeyChecking=no -o UserKnownHostsFile={folder}/known -o LogLevel=ERROR"
        try:
            probe = [*reach.split(), "127.0.0.1", "true"]
            wait_for(lambda: server.poll() is not None or subprocess.run(probe).returncode == 0, "an answer from sshd")
            if server.poll() is not None:
                pytest.skip("this user may not run an sshd here")
            yield reach
        finally:
            server.terminate()
