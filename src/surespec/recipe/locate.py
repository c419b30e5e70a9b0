"""Find the server in a command: ``vllm serve``, a Python module, a container's image and what follows it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from surespec.recipe.arguments import Arg, Variables, commands
from surespec.recipe.shell import read_shell
from surespec.recipe.text import OPAQUE, Context, Source

MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "sglang.launch_server": "sglang",
    "tensorrt_llm.commands.serve": "trtllm",
    "dynamo.vllm": "dynamo",
    "dynamo.sglang": "dynamo-sglang",
    "dynamo.trtllm": "dynamo-trtllm",
}
# The engine of an image by its last path component, and the program its own entry point starts already.
_IMAGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (r"vllm-openai(-\w+)*$", "vllm", ("vllm", "serve")),
    (r"vllm-runtime$", "dynamo", ()),
    (r"sglang-runtime$", "dynamo-sglang", ()),
    (r"tensorrtllm-runtime$", "dynamo-trtllm", ()),
    (r"llama\.cpp$", "llamacpp", ("llama-server",)),
    (r"llama[_.-]?cpp", "llamacpp", ()),
    (r"vllm", "vllm", ()),
    (r"sglang", "sglang", ()),
    (r"(tensorrt-llm|tensorrt_llm|trtllm|release)$", "trtllm", ()),
)
_OFFICIAL = re.compile(r"(^|/)vllm/vllm-openai")  # others may have an entry point of their own
_TALKERS = {"echo", "printf", "pip", "pip3", "pkill", "kill", "grep", "which", "command", "cd", "curl", "cat"}
_CONTAINERS = re.compile(r"(docker|podman|nerdctl)$|\$\{?\w*(DOCKER|PODMAN|CONTAINER)\w*\}?$", re.I)
_SHELLS = {"bash", "sh", "zsh", "dash"}
_DOCKER_SWITCHES = {
    "--detach", "--interactive", "--tty", "--rm", "--privileged", "--init", "--read-only", "--no-healthcheck",
    "--oom-kill-disable", "--publish-all", "--sig-proxy", "--disable-content-trust", "--quiet", "--help",
}  # fmt: skip


@dataclass(frozen=True)
class Docker:
    """A ``docker run``: its options as (name, value) and where the image stands."""

    options: tuple[tuple[str, Arg, str], ...]
    image: Arg

    def values(self, *names: str) -> list[str]:
        """All values of an option."""
        return [value for name, _, value in self.options if name in names]


@dataclass(frozen=True)
class Server:
    """A server found in a recipe. ``args`` are the engine's own; ``program`` the words that name it.

    ``entry`` is the program the image starts by itself when another (``head``) is given to it all the same, a mistake.
    ``env`` are the names set for it; ``words`` the whole command that starts it (with docker and all), where it is one.
    """

    engine: str
    args: tuple[Arg, ...]
    program: tuple[Arg, ...] = ()
    docker: Docker | None = None
    image: str = ""
    entry: tuple[str, ...] = ()
    head: Arg | None = None
    name: str = ""
    offset: int = 0
    env: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    context: str = "shell"
    words: tuple[Arg, ...] = ()


def image_engine(image: str) -> tuple[str, tuple[str, ...]]:
    """Engine and built-in program of an image; ("", ()) for an unknown one."""
    last = re.sub(r"@sha256:.*$", "", image).rsplit("/", 1)[-1]
    name, _, tag = last.partition(":")
    for pattern, engine, entry in _IMAGES:
        if re.search(pattern, name) and not (engine == "trtllm" and name == "release" and "tensorrt" not in image):
            if engine == "llamacpp" and entry and not tag.startswith("server"):
                entry = ()
            return engine, entry
    return "", ()


def image_version(image: str) -> str:
    """The engine's version in an image's tag (``v0.27.1``, ``0.8.6-r36.4-cu128``); empty when the tag has none.

    NGC tags (``25.09-py3``) and Dynamo tags are versions of the container or of Dynamo, not of the engine.
    """
    tag = re.sub(r"@sha256:.*$", "", image).rsplit("/", 1)[-1].partition(":")[2]
    found = re.match(r"v?(\d+\.\d+(?:\.\d+)*(?:\.?(?:post|rc)\d+)?)", tag)
    if found is None or re.match(r"\d\d\.\d\d-py3", tag) or image.startswith("nvcr.io/nvidia/vllm"):
        return ""
    return found[1]


def servers_in(words: Sequence[Arg], source: Source) -> list[Server]:
    """The servers a command starts: none, one, or several when it is a shell that runs a text."""
    if not words or _base(words[0]) in _TALKERS:
        return []
    docker = _docker(words)
    if docker is None:
        found_here = command_servers(words, source)
        return [s if s.words else replace(s, words=tuple(words)) for s in found_here]
    found, rest = docker
    entry = [tail(arg, value) for n, arg, value in found.options if n == "--entrypoint" and value][-1:]
    name = next(iter(found.values("--name")), "")
    env = tuple(v.partition("=")[0] for v in found.values("--env", "-e"))
    ports = tuple(found.values("--publish", "-p"))
    got = container_servers(found.image.text, rest, source, entry, _container_env(found))
    return [
        replace(
            s,
            docker=found,
            image=found.image.text,
            name=name,
            offset=words[0].span[0],
            env=env,
            ports=ports,
            words=tuple(words),
        )
        for s in got
    ]


def docker_image(words: Sequence[Arg]) -> Arg | None:
    """The image of a ``docker run``."""
    found = _docker(words)
    return found[0].image if found else None


def container_servers(
    image: str,
    rest: Sequence[Arg],
    source: Source,
    entrypoint: Sequence[Arg] = (),
    env: Variables | None = None,
) -> list[Server]:
    """The server a container starts with these arguments.

    ``entrypoint`` empty: the image's own. ``env``: the variables set in the container.
    """
    engine, entry = image_engine(image)
    if entrypoint:
        return command_servers([*entrypoint, *rest], source, env)
    named = command_servers(rest, source, env)
    if named:
        return [
            replace(s, entry=entry, head=rest[0]) if _front(s, rest) and entry and _OFFICIAL.search(image) else s
            for s in named
        ]
    if engine and entry and rest and rest[0].text == entry[-1] and _OFFICIAL.search(image):
        # `docker run IMAGE serve MODEL`: the image's own `vllm serve` would take serve for the model.
        return [Server(engine, tuple(rest[1:]), (rest[0],), offset=rest[0].span[0], entry=entry, head=rest[0])]
    if engine and entry:
        return [Server(engine, tuple(rest), offset=rest[0].span[0] if rest else 0)]
    return []


def tail(arg: Arg, value: str) -> Arg:
    """The last characters of an option: its value after ``=``."""
    return replace(arg, chars=arg.chars[len(arg.chars) - len(value) :])


def _container_env(docker: Docker) -> Variables:
    """The variables a ``docker run`` sets, for a shell in the container."""
    env = Variables()
    for name, arg, value in docker.options:
        key, equals, text = value.partition("=")
        if name in ("--env", "-e") and equals and not arg.unknown:
            env.set(key, tail(arg, text).chars)
    return env


def _front(server: Server, rest: Sequence[Arg]) -> bool:
    """Whether the program is named by the container's first argument (or by a shell that is)."""
    return bool(rest) and (rest[0] in server.program or _base(rest[0]) in _SHELLS)


def command_servers(words: Sequence[Arg], source: Source, env: Variables | None = None) -> list[Server]:
    """Servers in a plain command: the engine's program anywhere in it, or a text given to a shell."""
    for i, word in enumerate(words):
        found = _program(words, i)
        if found is not None:
            engine, end = found
            return [Server(engine, tuple(words[end:]), tuple(words[i:end]), offset=word.span[0])]
        if word.text == "eval" and i + 1 < len(words):
            return _nested(words[i + 1], source, env)
        if _base(word) in _SHELLS:
            text = _shell_text(words[i + 1 :])
            if text is not None:
                return _nested(text, source, env)
    return []


def _shell_text(words: Sequence[Arg]) -> Arg | None:
    """The text that ``sh -c`` runs: the first argument after its options."""
    options = list(itertools.takewhile(lambda w: re.match(r"[-+]\w", w.text), words))
    rest = words[len(options) :]
    return rest[0] if rest and any(re.fullmatch(r"-\w*c\w*", o.text) for o in options) else None


def _nested(text: Arg, source: Source, env: Variables | None) -> list[Server]:
    """Servers in the text of ``sh -c``."""
    if not text.chars:
        return []
    script = read_shell(text.chars, source)
    out = []
    for command in commands(script, _code_context(text), env):
        out += servers_in(command, source)
    return out


def _code_context(text: Arg) -> Context:
    """How code in this argument is spelled: as its first known character is."""
    return next((c.ctx for c in text.chars if c.ctx is not OPAQUE), OPAQUE)


def _program(words: Sequence[Arg], i: int) -> tuple[str, int] | None:
    """(engine, index of its first argument) when words[i] begins an engine's program."""
    base = _base(words[i])
    following = words[i + 1].text if i + 1 < len(words) else ""
    if base == "vllm" and following == "serve":
        return "vllm", i + 2
    if base == "sglang" and following == "serve":
        return "sglang", i + 2
    if base == "trtllm-serve":
        return "trtllm", i + (2 if following == "serve" else 1)
    if base == "llama-server":
        return "llamacpp", i + 1
    if re.fullmatch(r"python(3(\.\d+)?)?", base):
        for j in range(i + 1, len(words) - 1):
            if words[j].text == "-m":
                engine = MODULES.get(words[j + 1].text)
                serve = words[j + 2].text == "serve" if j + 2 < len(words) else False
                if engine and words[j + 1].text in ("vllm.entrypoints.cli.main", "tensorrt_llm.commands.serve"):
                    return engine, j + (3 if serve else 2)
                return (engine, j + 2) if engine else None
            if not words[j].text.startswith("-"):
                break
    return None


def _base(arg: Arg) -> str:
    return arg.text.rsplit("/", 1)[-1]


def _docker(words: Sequence[Arg]) -> tuple[Docker, Sequence[Arg]] | None:
    """A ``docker run`` or ``create`` in the command, and the arguments after its image."""
    start = next((i for i, w in enumerate(words) if _CONTAINERS.match(_base(w))), None)
    if start is None:
        return None
    run = next((i for i in range(start + 1, len(words)) if words[i].text in ("run", "create")), None)
    if run is None or words[run - 1].text == "compose":
        return None
    options: list[tuple[str, Arg, str]] = []
    i = run + 1
    while i < len(words):
        text = words[i].text
        if not text.startswith("-") or text == "-":
            return Docker(tuple(options), words[i]), words[i + 1 :]
        if text.startswith("--"):
            name, equals, value = text.partition("=")
            takes = not equals and name not in _DOCKER_SWITCHES
        else:
            cluster = re.match(r"-[ditPq]*([a-zA-Z]?)(.*)", text, re.S)
            letter, value = (cluster[1], cluster[2]) if cluster else ("", "")
            name, takes, equals = f"-{letter}", bool(letter) and not value, value
        if takes and i + 1 < len(words):
            options.append((name, words[i + 1], words[i + 1].text))
            i += 1
        else:
            options.append((name, words[i], value))
        i += 1
    return None
