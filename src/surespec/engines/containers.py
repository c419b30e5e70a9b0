"""Running containers that serve a model, as docker and podman tell of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surespec.engines.server_lines import ServerLine, is_idle, server_line_in_shell
from surespec.json_text import loads_json
from surespec.recipe.locate import image_engine

PROGRAMS = ("docker", "podman")
ASK_TIMEOUT_S = 20.0
_POD = "io.kubernetes.pod.name"


@dataclass(frozen=True)
class Container:
    """A container with a server. ``argv`` is what it runs, ``port`` the one clients use on this machine.

    ``managed_by`` names who would start it again by itself; empty for a plain container.
    """

    program: str
    id: str
    name: str
    image: str
    line: ServerLine
    argv: tuple[str, ...] = field(repr=False)
    port: int | None = None
    auto_remove: bool = False
    managed_by: str = ""


def running_containers() -> list[Container]:
    """Containers with a server, of every program that is here and answers."""
    found: list[Container] = []
    for name in PROGRAMS:
        program = shutil.which(name)
        if program is None:
            continue
        ids = ask([program, "ps", "--quiet", "--no-trunc"]).split()
        described = _documents(ask([program, "inspect", *ids])) if ids else []
        known = {container.id for container in found}  # podman may answer as docker
        found += [c for c in (_container(name, entry) for entry in described) if c is not None and c.id not in known]
    return found


def ask(argv: Sequence[str]) -> str:
    """What a program prints; empty when it fails or does not answer in time."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _documents(text: str) -> list[Mapping[str, Any]]:
    try:
        entries = loads_json(text)
    except ValueError:
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _container(program: str, entry: Mapping[str, Any]) -> Container | None:
    """The container of an ``inspect`` document, None when it serves no model. Absent fields count as empty."""
    config, host = _table(entry, "Config"), _table(entry, "HostConfig")
    identity = str(entry.get("Id", ""))
    arguments = entry.get("Args")
    argv = [str(word) for word in (entry.get("Path"), *(arguments if isinstance(arguments, list) else ())) if word]
    image = str(config.get("Image") or entry.get("ImageName") or "")
    line = server_line_in_shell(argv)
    engine, built_in = image_engine(image)
    if line is None and engine and built_in and not is_idle(argv):
        line = ServerLine(engine, engine, None, "", startable=True)
    if line is None or not identity:
        return None
    labels = _table(config, "Labels")
    managed = f"Kubernetes (pod {labels[_POD]})" if labels.get(_POD) else ""
    return Container(
        program=program,
        id=identity,
        name=str(entry.get("Name", "")).lstrip("/") or identity[:12],
        image=image,
        line=line,
        argv=tuple(argv),
        port=_published(host, line.port),
        auto_remove=bool(host.get("AutoRemove")),
        managed_by=managed,
    )


def _published(host: Mapping[str, Any], inner: int | None) -> int | None:
    """The port on this machine: the published one of the server's own, else with the host's network its own."""
    for name, places in _table(host, "PortBindings").items():
        if inner is not None and name.partition("/")[0] != str(inner):
            continue
        for place in places or ():
            number = str(place.get("HostPort", "")) if isinstance(place, dict) else ""
            if number.isdigit():
                return int(number)
    return inner if host.get("NetworkMode") == "host" else None


def _table(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = entry.get(name)
    return value if isinstance(value, dict) else {}
