"""Shell recipes: launch scripts, one-line commands, Dynamo's launch scripts."""

from __future__ import annotations

import re

from surespec.recipe.arguments import Arg, commands
from surespec.recipe.base import Diagnosis, Kind
from surespec.recipe.flags import is_flag
from surespec.recipe.locate import Server, docker_image, servers_in
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
    lines = commands(script, FILE)
    found = [s for command in lines for s in servers_in(command, source)]
    if not found:
        _explain_nothing(script, lines, source)
    kind: Kind = "cmdline"
    if found and found[0].engine.startswith("dynamo") and found[0].docker is None:
        kind = "dynamo_script"
    elif found and found[0].docker is not None:
        kind = "docker"
    return kind, found, [*_script_faults(source, found), *_lost_flags(lines, source, found)]


def _explain_nothing(script: Script, lines: list[list[Arg]], source: Source) -> None:
    """Say why a script that talks of a server starts none that can be read."""
    for doc in script.heredocs:
        if _ENGINE_WORDS.search(doc.text):
            raise source.error(
                doc.start,
                "the server's command is written by this here-document, not run by this script.",
                "Name the file it writes instead, or write the command out.",
            )
    for words in lines:
        image = docker_image(words)
        if image is not None:
            raise source.error(
                image.span[0],
                f"the image {image.text} is not one surespec knows, and its command names no engine.",
                "Write the program out: --entrypoint vllm IMAGE serve MODEL ...",
            )


def _script_faults(source: Source, servers: list[Server]) -> list[Diagnosis]:
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
    ends = [(s.offset, max([s.offset, *(a.span[1] for a in s.args if a.home.kind == "shell")])) for s in servers]

    def of_a_server(at: int) -> bool:
        return any(start <= at <= end + 3 for start, end in ends)

    for found in re.finditer(r"\\[ \t]+\r?\n(?=[ \t]*-)", source.text):
        if not of_a_server(found.start()):
            continue
        words = "a blank follows the backslash, so the command ends here."
        out.append(Diagnosis("broken-continuation", source.line(found.start()), words, "Remove the blank."))
    for found in re.finditer(r"\\\r?\n[ \t]*#[^\n]*\n(?=[ \t]*-)", source.text):
        if not of_a_server(found.start()):
            continue
        line = source.line(found.start()) + 1
        words = "a comment between continued lines ends the command here; the flags after it are lost."
        out.append(Diagnosis("comment-in-command", line, words, "Move the comment above the command."))
    return out


def _lost_flags(lines: list[list[Arg]], source: Source, servers: list[Server]) -> list[Diagnosis]:
    """A command that begins with a flag: the line before it lacks its backslash."""
    out = []
    for words in lines:
        if not words or not is_flag(words[0].text) or words[0].home.kind != "shell":
            continue
        start = words[0].span[0]
        before = source.text[: source.text.rfind("\n", 0, start) + 1].rstrip()
        owner = [s for s in servers if any(a.home.kind == "shell" and a.span[1] == len(before) for a in s.args)]
        if owner:
            fault = f"it begins with {words[0].text}, but the line before does not go on; this flag is lost."
            out.append(Diagnosis("lost-flags", source.line(start), fault, "End the line before with a backslash."))
    return out
