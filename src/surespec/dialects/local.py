"""The embedded engine: ``surespec serve``."""

from __future__ import annotations

from surespec.dialects.base import Command, Deployment, compact_json, shell_line

# What `surespec fetch` calls the checkpoints it knows.
_NAMES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m"}


def render(d: Deployment) -> Command:
    """``surespec serve`` with vLLM's own JSON."""
    name = _NAMES.get(d.model.id, d.model.path or d.model.id)
    argv = ["surespec", "serve", "--model", name, "--host", d.host, "--port", str(d.port)]
    if d.config:
        argv += ["--speculative-config", compact_json(d.config)]
    return Command(tuple(argv), shell_line(argv))
