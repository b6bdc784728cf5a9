"""Two hosts on this machine: network namespaces with a cable between them, and an sshd in each.

Nothing outside of them is changed: keys and settings lie in the test's directory, and sshd gets a
/run of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.launched import wait_until

ADDRESSES = ("10.211.211.1", "10.211.211.2")
SSHD = "/usr/sbin/sshd"
SETTINGS = """
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
ListenAddress {address}
"""


@dataclass
class TwoHosts:
    """The names of their namespaces, and the ssh that reaches them from the first."""

    names: tuple[str, str]
    directory: Path
    servers: dict[int, subprocess.Popen[bytes]]
    ssh: str

    def inside(self, number: int) -> list[str]:
        """The beginning of a command that runs on a host."""
        return ["ip", "netns", "exec", self.names[number]]

    def open(self, number: int) -> None:
        """Start the sshd of a host."""
        self.servers[number] = _serve(self.inside(number), self.directory, ADDRESSES[number])

    def close(self, number: int) -> None:
        """End the sshd of a host; what it has started goes on."""
        server = self.servers.pop(number)
        server.terminate()
        server.wait()


def why_not() -> str:
    """Return why there can be no hosts here, "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "ssh", "ssh-keygen") if shutil.which(name) is None]
    missing += [] if Path(SSHD).exists() else ["sshd (openssh-server)"]
    if missing:
        return f"there is no {', '.join(missing)}"
    name = f"zs-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode == 0:
        _run("ip", "netns", "del", name)
    return tried.stderr.strip()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def two_hosts(directory: Path) -> Iterator[TwoHosts]:
    """Yield two hosts whose files lie in `directory`."""
    first, second = names = (f"zs-a-{os.getpid()}", f"zs-b-{os.getpid()}")
    with ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", second)
        _run("ip", "-n", first, "link", "add", "eth0", *cable)
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key))
        host_key = " ".join((directory / "host_key.pub").read_text().split()[:2])
        known = "".join(f"{address} {host_key}\n" for address in ADDRESSES)
        (directory / "known").write_text(known)
        ssh = f"ssh -F /dev/null -i {directory}/key -o UserKnownHostsFile={directory}/known"
        hosts = TwoHosts(names, directory, {}, ssh)
        for number in range(len(ADDRESSES)):
            hosts.open(number)
            stack.callback(hosts.close, number)
        yield hosts


def _serve(inside: list[str], directory: Path, address: str) -> subprocess.Popen[bytes]:
    settings = directory / f"sshd-{address}"
    settings.write_text(SETTINGS.format(directory=directory, address=address))
    log = directory / f"log-{address}"
    start = f"mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec {SSHD} -D -e -f {settings}"
    with log.open("wb") as file:
        server = subprocess.Popen([*inside, "sh", "-c", start], stdout=file, stderr=file)
    wait_until(lambda: b"Server listening" in log.read_bytes() or server.poll() is not None)
    assert server.poll() is None, log.read_text()
    return server
