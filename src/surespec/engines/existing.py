"""Find inference servers that run on this machine already: a device carries one model at a time.

Processes are known by their command line, containers by what ``docker inspect`` (or podman's) says. Our own process,
its ancestors and its children do not count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from surespec.engines.containers import Container, running_containers
from surespec.engines.server_lines import ServerLine, server_line, shortened
from surespec.errors import EngineError
from surespec.rules import load_topic

_CONTAINER = re.compile(r"(?:docker|libpod|crio|cri-containerd|containerd)[-/:]([0-9a-f]{12,64})|/([0-9a-f]{64})\b")
_STOP_FIRST = "Stop it first, or give --stop-existing: surespec then stops it and starts it again at the end."


@dataclass(frozen=True)
class Existing:
    """A server that already runs. ``pid`` of its outermost process, or ``container``; ``obstacle`` says why surespec
    cannot stop it and start it again as it was (empty when it can), ``way_out`` what to do then."""

    engine: str
    name: str
    argv: tuple[str, ...] = field(repr=False)
    port: int | None = None
    host: str = ""
    pid: int = 0
    container: Container | None = None
    obstacle: str = ""
    way_out: str = ""

    @property
    def label(self) -> str:
        """``vLLM (process 4711, port 8000)``."""
        what = f"process {self.pid}" if self.container is None else f"container {self.container.name}"
        return f"{self.name} ({what}{f', port {self.port}' if self.port else ''})"

    def sentence(self) -> str:
        """That it runs, with its command, secrets removed."""
        return f"{self.label} is running here already: {shortened(self.argv)}."


def find_existing() -> tuple[Existing, ...]:
    """The servers that run now, containers first. Never raises: what cannot be asked about is left out."""
    containers = [_of_container(found) for found in running_containers()]
    inside = [found.container.id for found in containers if found.container is not None]
    return (*containers, *(found for found in _processes() if not _in_one_of(found.pid, inside)))


def refuse_existing(found: Sequence[Existing], *, stop: bool) -> None:
    """Raise EngineError for what must not or cannot be stopped; return when the way is free.

    ``stop``: the user gave ``--stop-existing``.
    """
    for server in found:
        if not stop:
            hint = server.way_out if server.obstacle else _STOP_FIRST
            words = "A device carries one model at a time, and"
            raise EngineError(f"{words} {server.sentence()}", hint=hint)
        if server.obstacle:
            raise EngineError(f"{server.label} {server.obstacle}", hint=server.way_out)


def outermost(pids: Iterable[int], parent_of: Mapping[int, int]) -> list[int]:
    """Of processes of servers, those without another one above them."""
    wanted = set(pids)
    return sorted(pid for pid in wanted if wanted.isdisjoint(_above(pid, parent_of)))


def _above(pid: int, parent_of: Mapping[int, int]) -> Iterator[int]:
    """The ancestors of a process, nearest first."""
    seen = {pid}
    while (pid := parent_of.get(pid, 0)) and pid not in seen:
        seen.add(pid)
        yield pid


def unit_of(cgroup: str) -> tuple[str, bool]:
    """The systemd service that a ``/proc/PID/cgroup`` names, and whether it is a user's; ("", False) without one.

    Only the innermost group counts: a terminal runs below ``user@1000.service``, but in a scope of its own.
    """
    for line in cgroup.splitlines():
        path = line.rpartition(":")[2].rstrip("/")
        leaf = path.rsplit("/", 1)[-1]
        user = "/user@" in path
        known = leaf in load_topic("servers")["hosts_of_many"] or leaf.startswith("user@")
        if leaf.endswith(".service") and not known:
            return leaf, user
    return "", False


def container_of(cgroup: str) -> str:
    """The id of the container that a ``/proc/PID/cgroup`` names; empty without one."""
    match = _CONTAINER.search(cgroup)
    return (match[1] or match[2]) if match else ""


def _processes() -> list[Existing]:
    me = os.getpid()
    parents: dict[int, int] = {}
    lines: dict[int, tuple[list[str], ServerLine]] = {}
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "status"]):
        info = process.info
        parents[info["pid"]] = info["ppid"] or 0
        argv = info["cmdline"] or []
        line = server_line(argv)
        if line is not None and info["status"] != psutil.STATUS_ZOMBIE:
            lines[info["pid"]] = (argv, line)
    mine = {me, *_above(me, parents)}
    others = (pid for pid in outermost(lines, parents) if pid not in mine and me not in _above(pid, parents))
    return [_of_process(pid, parents, *lines[pid]) for pid in others]


def _of_process(pid: int, parents: Mapping[int, int], argv: Sequence[str], line: ServerLine) -> Existing:
    obstacle, way_out = _obstacle(pid, parents.get(pid, 0), line)
    port = line.port or next(iter(_ports(pid)), None)
    if line.startable and line.port is None and not obstacle:
        obstacle, way_out = (
            "was started on any free port, so it would come back on another one.",
            f"End it yourself: kill {pid}",
        )
    return Existing(line.engine, line.name, tuple(argv), port, line.host, pid, None, obstacle, way_out)


def _ports(pid: int) -> list[int]:
    """The TCP ports a process listens on, as far as it tells."""
    try:
        found = psutil.Process(pid).net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    return sorted(c.laddr.port for c in found if c.status == psutil.CONN_LISTEN and c.laddr)


def _obstacle(pid: int, parent: int, line: ServerLine) -> tuple[str, str]:
    """Why surespec cannot stop a process and start it again as it was, and the way out."""
    own, cgroup = _cgroup("self"), _cgroup(str(pid))
    if (container := container_of(cgroup)) and container != container_of(own):
        return (
            f"runs in the container {container[:12]}, which surespec cannot ask docker or podman about.",
            f"Stop it yourself: docker stop {container[:12]}",
        )
    unit, user = unit_of(cgroup)
    if unit and unit != unit_of(own)[0]:
        flag = " --user" if user else ""
        return (
            f"belongs to the systemd unit {unit}, which would start it again by itself.",
            f"Type: systemctl{flag} stop {unit}; and after the run: systemctl{flag} start {unit}",
        )
    if not line.startable:
        return "does not show how it was started, so it cannot be started again.", f"End it yourself: kill {pid}"
    if "surespec/engines/guard.py" in " ".join(_argv(parent)):
        return "belongs to another run of surespec.", "Wait until that run has ended, or stop it with Ctrl-C."
    try:
        process = psutil.Process(pid)
        process.environ()
        process.cwd()
        foreign = os.geteuid() not in (0, process.uids().real)
    except psutil.Error:
        foreign = True
    if foreign:
        return "belongs to another user, so its environment cannot be read.", "Run surespec as that user, or as root."
    return "", ""


def _of_container(found: Container) -> Existing:
    line = found.line
    obstacle = way_out = ""
    if found.managed_by:
        obstacle = f"is managed by {found.managed_by}, which would start it again by itself."
        way_out = f"Stop it there, for example by scaling it to 0, and start it again after the run ({found.name})."
    elif found.auto_remove:
        obstacle = "was started with --rm, so it would vanish when it is stopped and could not be started again."
        way_out = f"Stop it yourself with `{found.program} stop {found.name}`, and run its command again afterwards."
    return Existing(line.engine, line.name, found.argv, found.port, "", 0, found, obstacle, way_out)


def _in_one_of(pid: int, containers: Sequence[str]) -> bool:
    container = container_of(_cgroup(str(pid)))
    return bool(container) and any(known.startswith(container) or container.startswith(known) for known in containers)


def _cgroup(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _argv(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except (psutil.Error, ValueError):
        return []
