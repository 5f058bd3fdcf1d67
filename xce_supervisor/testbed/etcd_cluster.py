"""A real etcd cluster of three members on loopback, for the demo and tests: started, stopped, continued, killed, reaped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

ELECTION_MS = 500
HEARTBEAT_MS = 50
START_S = 20.0


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


class EtcdCluster:
    """Three members; `url(prefix)` is the store's address."""

    def __init__(self, binary: str, folder: Path, members: int = 3) -> None:
        ports = free_ports(2 * members)
        self._binary, self._folder = binary, folder
        self.client_ports, self._peer_ports = ports[:members], ports[members:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members

    def start(self) -> None:
        """Start all members and wait until each answers."""
        for member in range(len(self.client_ports)):
            self.start_member(member)
        self.wait_healthy()

    def start_member(self, member: int) -> None:
        """Start one member with the data that it had."""
        peers = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peer_ports))
        client, peer = (f"http://127.0.0.1:{ports[member]}" for ports in (self.client_ports, self._peer_ports))
        command = [
            self._binary, "--name", f"m{member}", "--data-dir", str(self._folder / f"m{member}"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", peers, "--initial-cluster-token", self._folder.name,
            "--heartbeat-interval", str(HEARTBEAT_MS), "--election-timeout", str(ELECTION_MS),
            "--logger", "zap", "--log-level", "error", "--log-outputs", str(self._folder / f"m{member}.log"),
        ]  # fmt: skip
        self._processes[member] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"]},
        )

    def wait_healthy(self) -> None:
        """Wait until every running member answers a linearizable read."""
        ends_at = time.monotonic() + START_S
        for member, port in enumerate(self.client_ports):
            if self._processes[member] is None:
                continue
            while not _healthy(port):
                assert time.monotonic() < ends_at, f"etcd member {member} did not come up; see {self._folder}/m{member}.log"
                time.sleep(0.05)

    def signal(self, member: int, number: int) -> None:
        """Send a signal to a member."""
        process = self._processes[member]
        assert process is not None
        process.send_signal(number)

    def kill(self, member: int) -> None:
        """Kill a member and reap it."""
        process = self._processes[member]
        if process is not None:
            process.kill()
            process.wait()
            self._processes[member] = None

    def stop(self) -> None:
        """Kill and reap all members."""
        for member in range(len(self._processes)):
            self.kill(member)

    def heal(self) -> None:
        """Continue what was stopped, start what was killed, and wait for it."""
        for member, process in enumerate(self._processes):
            if process is None:
                self.start_member(member)
            else:
                process.send_signal(signal.SIGCONT)
        self.wait_healthy()

    def pids(self) -> list[int]:
        """Return the pids of the members that were started and not killed."""
        return [process.pid for process in self._processes if process is not None]

    def url(self, prefix: str, ttl_s: int = 1) -> str:
        """The store's address; each test takes a prefix of its own."""
        return f"etcd://{','.join(f'127.0.0.1:{port}' for port in self.client_ports)}/{prefix}?ttl_s={ttl_s}"


def _healthy(port: int) -> bool:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(request)
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
    except OSError:
        return False
    return b'"health":"true"' in answer.replace(b" ", b"")
