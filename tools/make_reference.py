"""Writes docs/reference.md, every command with its flags, from the code: ``python tools/make_reference.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from surespec.cli import app
from surespec.schemas import nouns

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
INTRODUCTION = """# Reference

Every command with its flags. Written by `tools/make_reference.py` from the code; change the code, not this page.

Results go to stdout (`--json`: one document, schema by `surespec schema NOUN`), progress and messages to stderr.

| exit code | means |
|---|---|
| 0 | keep, or done |
| 1 | it failed; the message says why and what next |
| 2 | usage: what was typed, or a file of yours |
| 10 | disable; `plan`: no arm to try; `schedule`: no batch size gains |
| 11 | marginal or inconclusive |
| 12 | the output differs |

| variable | does |
|---|---|
| `SURESPEC_CACHE` | folder for fetched models |
| `SURESPEC_HOME` | folder under which engines are installed |
| `SURESPEC_VLLM_PYTHON`, `..._SGLANG_...`, `..._DYNAMO_...` | interpreter of that engine's environment |
| `SURESPEC_LLAMACPP_PROGRAM` | path of `llama-server` |
| `SURESPEC_API_KEY` | key that `serve` asks of its clients |
| `SURESPEC_DEBUG` | 1: show where surespec itself failed |
| `HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_ENDPOINT` | as Hugging Face's own tools read them |
| `NO_COLOR` | no colours |

Shell completion: `surespec --install-completion`, then a new shell.
"""


def page() -> str:
    """The whole page."""
    group = typer.main.get_command(app)
    commands: dict[str, Any] = group.commands  # type: ignore[attr-defined]
    documents = {line.split()[1]: noun for noun, line in nouns().items() if "dry-run" not in line}
    parts = [INTRODUCTION]
    for name, command in commands.items():
        words = [argument(p) for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(["surespec", name, *words, "[OPTIONS]"])
        parts.append(f"## surespec {name}\n\n{cell(command.help or '')}\n\n`{usage}`\n")
        if name in documents:
            parts.append(f"`--json`: schema `surespec/{documents[name]}/1`.\n")
        rows = [row(parameter) for parameter in command.params if parameter.name != "help"]
        parts.append("| | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def row(parameter: Any) -> str:
    """One flag or argument."""
    if parameter.param_type_name == "argument":
        label = argument(parameter)
    else:
        label = ", ".join((*parameter.opts, *parameter.secondary_opts)) + ("" if parameter.is_flag else " VALUE")
    default = parameter.default
    shown = "" if default in (None, "", False) or callable(default) else f"`{default}`"
    return f"| `{label}` | {shown} | {cell(getattr(parameter, 'help', '') or '')} |"


def argument(parameter: Any) -> str:
    """An argument as usage shows it."""
    label = (parameter.metavar or parameter.name.upper()).strip("[]")
    return label if parameter.required else f"[{label}]"


def cell(text: str) -> str:
    """Text for a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
