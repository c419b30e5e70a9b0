"""A recipe's command as a program is given it, so that it can be started without a shell.

What a shell would have done first is done here, as far as it can be known without running anything: variables of the
environment, ``~``, ``$(pwd)`` and ``$(id -u)``, ``cd``, ``export``, and the activation of a virtual environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surespec.errors import UsageError
from surespec.recipe.arguments import Arg, Home, Variables, assign, expand
from surespec.recipe.base import SECRET, Recipe
from surespec.recipe.locate import tail
from surespec.recipe.read import DEFAULT_PORT, recipe_kind
from surespec.recipe.shell import read_shell
from surespec.recipe.shell_nouns import Assignment, Simple
from surespec.recipe.text import FILE, OPAQUE, ShellQuote
from surespec.recipe.unit import unit_settings

_NAMED = re.compile(r"\$(?:(\w+)|\{(\w+)(?:[-:?+=].*)?\})", re.S)
_OWN_FOLDER = re.compile(r"""\$\(\s*dirname\s+(?:--\s+)?["']?\$(?:0|\{0\}|\{?BASH_SOURCE(?:\[0\])?\}?)["']?\s*\)""")
_DROPPED = {
    "--name", "--detach", "--interactive", "--tty", "--rm", "--restart", "--publish", "-p", "--publish-all", "-P",
    "--cidfile", "-",
}  # fmt: skip


@dataclass(frozen=True)
class Container:
    """A ``docker run`` in parts. ``options`` are name and value (None: a switch), without those that surespec sets
    itself (name, detaching, published ports); ``host_network``: it shares this machine's network."""

    program: tuple[str, ...]
    options: tuple[tuple[str, str | None], ...]
    image: str
    host_network: bool
    inner_port: int


@dataclass(frozen=True)
class Command:
    """``words`` is what is started: all of it outside containers, what follows the image inside.

    ``server_at`` is the index of the engine's first own argument, None when these are in the text of a shell.
    ``env`` is set for it and may hold secrets; ``cwd`` is its folder.
    """

    words: tuple[str, ...]
    server_at: int | None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: Path | None = None
    container: Container | None = None


def command_of(recipe: Recipe, environ: Mapping[str, str]) -> Command:
    """The command of a recipe that one process starts: docker, a command line, a systemd unit.

    ``environ`` is the environment in which a person would run it. Raises UsageError for other kinds and where only
    running the recipe would tell a word.
    """
    if recipe.kind not in ("docker", "cmdline", "systemd") or not recipe.server.words:
        raise UsageError(
            f"{recipe.path}: surespec starts docker commands, command lines and systemd units, not {_noun(recipe)}.",
            hint="Start each arm yourself: surespec tune --managed --endpoint URL --recipe FILE says what to change.",
        )
    env, cwd = _surroundings(recipe, environ)
    fill = _Filler(recipe, {**environ, **env}, cwd or Path.cwd())
    server = recipe.server
    if server.docker is None:
        words = _without_wrappers([fill(arg) for arg in server.words])
        first = _index(server.words, server.args) if server.args else None
        lost = len(server.words) - len(words)
        return Command(tuple(words), first - lost if first is not None else len(words), env, cwd)
    after = server.words[_place(server.words, server.docker.image) + 1 :]
    container, secret_env = _container(recipe, fill)
    first = _index(after, server.args) if server.args else None
    if not server.args and not server.program:
        first = len(after)
    return Command(tuple(fill(arg) for arg in after), first, {**env, **secret_env}, cwd, container)


def secrets_of(recipe: Recipe, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values of what is secret by its name in a recipe: flags of the engine, variables set for it."""
    found = []
    for flag in recipe.parsed.flags:
        if SECRET.search(flag.name):
            found += [flag.value or "", *(arg.text for arg in flag.values)]
    pairs = re.findall(r"""(?m)\b([A-Za-z_]\w*)=(?:"([^"\n]*)"|'([^'\n]*)'|([^\s"']+))""", recipe.source.text)
    found += ["".join(values) for name, *values in pairs if SECRET.search(name)]
    named = [environ.get(name.strip("${}"), "") for name in found if name.startswith("$")]
    return tuple(dict.fromkeys(value for value in (*found, *named) if value and not value.startswith("$")))


def with_flag(words: Sequence[str], start: int, name: str, value: str | None, aliases: Sequence[str] = ()) -> list[str]:
    """The command with this flag once, after ``start``; a value of None takes it out."""
    out = list(words[:start])
    names = (name, *aliases)
    i = start
    while i < len(words):
        spelled = words[i].partition("=")[0]
        if spelled in names or spelled.replace("_", "-") in names:
            i += 1 if "=" in words[i] else 2
            continue
        out.append(words[i])
        i += 1
    return out if value is None else [*out, name, value]


def _noun(recipe: Recipe) -> str:
    return {"compose": "compose services", "kubernetes": "Kubernetes objects"}.get(recipe.kind, "Dynamo graphs")


def _container(recipe: Recipe, fill: Callable[[Arg], str]) -> tuple[Container, dict[str, str]]:
    """The container's parts, and the variables given to it, which go through the environment of docker itself."""
    server = recipe.server
    docker = server.docker
    assert docker is not None
    run = next(i for i, word in enumerate(server.words) if word.text in ("run", "create"))
    options: list[tuple[str, str | None]] = []
    env: dict[str, str] = {}
    for name, arg, value in docker.options:
        text = fill(arg if arg.text == value else tail(arg, value)) if value else ""
        if name in _DROPPED:
            continue
        if name in ("--env", "-e"):
            key, equals, content = text.partition("=")
            if equals:
                env[key] = content
            options.append((name, key))
        else:
            options.append((name, text if value else None))
    host = any(name in ("--network", "--net") and value == "host" for name, value in options)
    inner = _inner_port(recipe)
    program = tuple(fill(arg) for arg in server.words[:run])
    if "sudo" in {Path(word).name for word in program[:1]} and env:
        program = (program[0], f"--preserve-env={','.join(sorted(env))}", *program[1:])
    return Container(program, tuple(options), fill(docker.image), host, inner), env


def _inner_port(recipe: Recipe) -> int:
    flag = recipe.parsed.last("--port", "-p")
    if flag is not None and (flag.value or "").isdigit():
        return int(flag.value or 0)
    return DEFAULT_PORT.get(recipe.engine, 8000)


def _place(words: Sequence[Arg], wanted: Arg) -> int:
    return next(i for i, word in enumerate(words) if word is wanted)


def _index(words: Sequence[Arg], args: Sequence[Arg]) -> int | None:
    """Where the engine's own arguments begin; None when they are not words of this command."""
    return next((i for i, word in enumerate(words) if word is args[0]), None)


def _without_wrappers(words: Sequence[str]) -> list[str]:
    """Without ``exec`` and ``nohup``, which mean something to a shell or a terminal only."""
    rest = list(words)
    while rest and rest[0] in ("exec", "nohup"):
        rest.pop(0)
    return rest


def _surroundings(recipe: Recipe, environ: Mapping[str, str]) -> tuple[dict[str, str], Path | None]:
    """What the script has set and where it stands when it comes to the server."""
    kind = recipe_kind(recipe.path, recipe.source.text)
    if kind == "unit":
        return _of_unit(recipe)
    if kind != "shell":
        return {}, None
    env: dict[str, str] = {}
    cwd: Path | None = None
    fill = _Filler(recipe, environ, Path.cwd())
    for command in _commands_before(recipe):
        fill = _Filler(recipe, {**environ, **env}, cwd or Path.cwd())
        if isinstance(command, tuple):
            name, chars, unknown = command
            env[name] = fill(Arg(chars, Home("shell"), (0, 0), unknown))
            continue
        words = [arg.text for arg in command]
        if words[0] == "cd" and len(words) > 1:
            cwd = (cwd or Path.cwd()) / fill(command[1])
        elif words[0] in ("source", ".") and len(words) > 1 and words[1].endswith("/bin/activate"):
            folder = ((cwd or Path.cwd()) / fill(command[1])).parent
            env["PATH"] = f"{folder}{os.pathsep}{env.get('PATH', environ.get('PATH', ''))}"
            env["VIRTUAL_ENV"] = str(folder.parent)
    return env, cwd


def _commands_before(recipe: Recipe) -> Iterator[list[Arg] | tuple[str, tuple, tuple[str, ...]]]:  # type: ignore[type-arg]
    """The script's commands before the server's, and (name, characters, unknowns) of what it puts into the
    environment, its own assignments last."""
    code = recipe.source.chars()
    script = read_shell(code[1:] if code and code[0].c == "\ufeff" else code, recipe.source)
    variables = Variables()
    variables.count(script)
    exported = set(re.findall(r"\b[A-Za-z_]\w*", " ".join(re.findall(r"\bexport\s+([^\n;&|]*)", recipe.source.text))))
    if re.search(r"^[ \t]*set[ \t]+(?:-\w*a|-o[ \t]+allexport)", recipe.source.text, re.M):
        exported |= {item.name for item in script.items if isinstance(item, Assignment)}

    def scalar(name: str) -> tuple[str, tuple, tuple[str, ...]] | None:  # type: ignore[type-arg]
        value = variables.scalars.get(name)
        return None if value is None else (name, tuple(value.chars), tuple(value.unknown))

    for item in script.items:
        if isinstance(item, Assignment):
            assign(item, variables, FILE)
            if item.name in exported or item.name in os.environ:
                found = scalar(item.name)
                if found is not None:
                    yield found
            continue
        if not isinstance(item, Simple):
            continue
        home = Home("shell", FILE, [(w.start, w.end) for w in item.words])
        words = [arg for word in item.words for arg in expand(word, variables, home, item.conditional)]
        if item.words[0].start <= recipe.server.offset < item.words[-1].end or any(
            word.span == recipe.server.words[0].span for word in words[:1]
        ):
            for prefix in item.assigned:
                assign(prefix, variables, FILE)
                found = scalar(prefix.name)
                if found is not None:
                    yield found
            return
        if words:
            yield words


def _of_unit(recipe: Recipe) -> tuple[dict[str, str], Path | None]:
    """``Environment=`` and ``WorkingDirectory=`` of a unit."""
    env, folder = unit_settings(recipe.source)
    return env, Path(folder) if folder.startswith("/") else None


class _Filler:
    """Gives the text of an argument with what only the machine tells filled in."""

    def __init__(self, recipe: Recipe, environ: Mapping[str, str], cwd: Path) -> None:
        self._recipe = recipe
        self._environ = environ
        self._cwd = cwd

    def __call__(self, arg: Arg) -> str:
        out, at = "", 0
        unknown = list(arg.unknown)
        chars = arg.chars
        while at < len(chars):
            if chars[at].ctx is OPAQUE and unknown:
                rest = "".join(c.c for c in chars[at:])
                raw = unknown.pop(0)
                if rest.startswith(raw):
                    out += self._value(raw, arg)
                    at += len(raw)
                    continue
            out += chars[at].c
            at += 1
        first = chars[0].ctx if chars else None
        if isinstance(first, ShellQuote) and first.style == "bare" and re.match(r"~(/|$)", out):
            home = self._environ.get("HOME") or str(Path.home())
            out = home + out[1:]
        return out

    def _value(self, raw: str, arg: Arg) -> str:
        named = _NAMED.fullmatch(raw)
        name = (named[1] or named[2]) if named else ""
        if name == "PWD":
            return str(self._cwd)
        if name:
            if name in self._environ:
                return self._environ[name]
            if not SECRET.search(name):
                raise self._unknown(raw, arg, f"Set {name} in the environment of surespec.")
            return ""
        if _OWN_FOLDER.fullmatch(raw):
            return str(self._recipe.path.absolute().parent)
        inner = re.sub(r"\s+", " ", raw.strip("`").removeprefix("$(").removesuffix(")").strip())
        known = {"pwd": str(self._cwd), "id -u": str(os.getuid()), "id -g": str(os.getgid())}
        if inner in known:
            return known[inner]
        raise self._unknown(raw, arg, "Write its value out.")

    def _unknown(self, raw: str, arg: Arg, hint: str) -> UsageError:
        line = self._recipe.source.line(arg.span[0]) if arg.span[1] else 1
        return UsageError(f"{self._recipe.path}, line {line}: only running it would tell what {raw} is.", hint=hint)


__all__ = ["Command", "Container", "command_of", "secrets_of", "with_flag"]
