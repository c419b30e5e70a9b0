"""Shell recipes: launch scripts, one-line commands, Dynamo's launch scripts."""

from __future__ import annotations

import re

from surespec.recipe.arguments import commands
from surespec.recipe.base import Diagnosis, Kind
from surespec.recipe.locate import Server, servers_in
from surespec.recipe.shell import read_shell
from surespec.recipe.shell_nouns import Script
from surespec.recipe.text import FILE, Source

_ENGINE_WORDS = re.compile(
    r"vllm\s+serve|vllm\.entrypoints|sglang\.launch_server|trtllm-serve|llama-server|dynamo\.\w+ "
)


def script_servers(source: Source) -> tuple[Kind, list[Server], list[Diagnosis]]:
    """The servers a script starts. Raises InputFileError for text no shell would read."""
    code = source.chars()
    if code and code[0].c == "\ufeff":
        code = code[1:]
    script = read_shell(code, source)
    found = [s for command in commands(script, FILE) for s in servers_in(command, source)]
    if not found:
        _explain_nothing(script, source)
    kind: Kind = "cmdline"
    if found and found[0].engine.startswith("dynamo") and found[0].docker is None:
        kind = "dynamo_script"
    elif found and found[0].docker is not None:
        kind = "docker"
    return kind, found, _script_faults(source)


def _explain_nothing(script: Script, source: Source) -> None:
    """Say why a script that talks of a server starts none that can be read."""
    for doc in script.heredocs:
        if _ENGINE_WORDS.search(doc.text):
            raise source.error(
                doc.start,
                "the server's command is written by this here-document, not run by this script.",
                "Name the file it writes instead, or write the command out.",
            )


def _script_faults(source: Source) -> list[Diagnosis]:
    out = []
    if "\r\n" in source.text:
        line = source.line(source.text.index("\r\n"))
        out.append(
            Diagnosis(
                "windows-line-ends",
                line,
                "the lines end in CR LF, as on Windows; bash takes the CR for part of the last word.",
                "Convert it with: sed -i 's/\\r$//' FILE. A patch keeps the line ends as they are.",
            )
        )
    for found in re.finditer(r"\\[ \t]+\r?\n(?=[ \t]*-)", source.text):
        words = "a blank follows the backslash, so the command ends here."
        out.append(Diagnosis("broken-continuation", source.line(found.start()), words, "Remove the blank."))
    for found in re.finditer(r"\\\r?\n[ \t]*#[^\n]*\n(?=[ \t]*-)", source.text):
        line = source.line(found.start()) + 1
        words = "a comment between continued lines ends the command here; the flags after it are lost."
        out.append(Diagnosis("comment-in-command", line, words, "Move the comment above the command."))
    return out
