"""The embedded engine: ``surespec serve``."""

from __future__ import annotations

from surespec.dialects.base import Command, Deployment, compact_json, shell_line


def render(d: Deployment) -> Command:
    """``surespec serve`` with vLLM's own JSON."""
    argv = ["surespec", "serve", "--model", d.model.path or d.model.id, "--host", d.host, "--port", str(d.port)]
    if d.config:
        argv += ["--speculative-config", compact_json(d.config)]
    return Command(tuple(argv), shell_line(argv))
