"""The commands ``doctor`` and ``schema``: flags -> calls -> output and exit code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surespec.json_text import dumps_json

if TYPE_CHECKING:
    from surespec.doctor import Diagnosis

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
_MARKS = {"ok": "ok", "missing": "MISSING", "warning": "warning", "absent": "-"}


def doctor_command(
    engine: Annotated[
        str, typer.Option("--engine", help="Require this engine: local, vllm, llamacpp, sglang, dynamo, trtllm.")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """What is missing on this machine, and the command that mends it. Exit code 1: something required is missing."""
    from surespec.doctor import examine

    found = examine(engine)
    _print_json(found.document()) if as_json else _print(found)
    raise typer.Exit(found.exit_code)


def schema_command(
    noun: Annotated[str, typer.Argument(help="plan, bench, judge, tune ...; without it all are listed.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """The JSON schema of a document that --json prints."""
    from surespec.schemas import nouns, schema

    if noun:
        _print_json(schema(noun))
    elif as_json:
        _print_json({"schema": "surespec/schemas/1", "nouns": nouns()})
    else:
        for name, command in nouns().items():
            print(f"{name:10} {command}")


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(dumps_json(document))
    sys.stdout.write("\n")


def _print(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    styles = {"ok": "green", "missing": "bold red", "warning": "yellow", "absent": "dim"}
    for check in found.checks:
        mark = f"{_MARKS[check.status]:8}"
        console.print(f"[{styles[check.status]}]{mark}[/] {check.name:14} {escape(check.found)}")
        if check.fix:
            console.print(f"{'':23} [bold]{escape(check.fix)}[/bold]")
    missing = [check.name for check in found.checks if check.status == "missing"]
    console.print(
        f"Missing: {', '.join(missing)}. The command under each mends it."
        if missing
        else "Nothing required is missing. Try it: surespec tune --model smollm2-135m"
    )


__all__ = ["doctor_command", "schema_command"]
