"""YAML recipes: compose files, Kubernetes manifests, Dynamo graphs. All are containers with a command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from surespec.recipe.arguments import Arg, Home, Variables, commands
from surespec.recipe.base import Diagnosis, Kind
from surespec.recipe.interpolate import compose_chars, compose_spans, dotenv, kubernetes_chars
from surespec.recipe.locate import Server, container_servers
from surespec.recipe.shell import read_shell
from surespec.recipe.text import FILE, Char, Chars, Doubled, Source, text_of
from surespec.recipe.yaml_text import chars_of, entry, load_nodes, pairs, scalar, span


@dataclass(frozen=True)
class Container:
    """One container of a manifest. ``owner`` is the node its own lines stand in."""

    name: str
    owner: Node
    image: Node | None
    entrypoint: Node | None
    command: Node | None
    env: Node | None
    ports: tuple[str, ...]
    compose: bool


def manifest_servers(source: Source, path: Path) -> tuple[Kind, list[Server], list[Diagnosis]]:
    """The servers of a compose file, a Kubernetes manifest or a Dynamo graph."""
    documents = load_nodes(source)
    kind: Kind = "kubernetes"
    containers: list[Container] = []
    for document in documents:
        if isinstance(entry(document, "services"), MappingNode) and entry(document, "apiVersion") is None:
            kind = "compose"
            containers += _compose(document)
        elif scalar(entry(document, "kind")).startswith("Dynamo"):
            kind = "dynamo"
            containers += _pods(document, scalar(entry(document, "metadata", "name")), set(), named=True)
        elif entry(document, "kind") is not None:
            containers += _pods(document, scalar(entry(document, "metadata", "name")), set(), named=False)
    if not containers:
        raise source.error(
            0,
            "this YAML is no compose file, no Kubernetes manifest with containers and no Dynamo graph.",
            "Name the file that starts the server.",
        )
    variables = dotenv(path.parent / ".env") if kind == "compose" else {}
    found = [s for c in containers for s in _servers(c, source, variables)]
    if not found:
        _explain_nothing(containers, source, variables)
    return kind, found, []


def _explain_nothing(containers: list[Container], source: Source, variables: dict[str, str]) -> None:
    last = containers[-1]
    image = _text(last.image, source, last, variables)
    node = last.image or last.owner
    raise source.error(
        span(node)[0],
        f"the image {image or '(none)'} is not one surespec knows, and its command names no engine.",
        "Write the command out (vllm serve MODEL ..., python -m ...), or tell the flag by hand.",
    )


def _compose(document: Node) -> Iterator[Container]:
    for name, service in pairs(entry(document, "services")):
        yield Container(
            name,
            service,
            entry(service, "image"),
            entry(service, "entrypoint"),
            entry(service, "command"),
            entry(service, "environment"),
            _ports(entry(service, "ports")),
            compose=True,
        )


def _pods(node: Node, name: str, seen: set[int], *, named: bool) -> Iterator[Container]:
    """Containers anywhere in a manifest, each node once (``seen``), however many aliases lead to it.

    ``named``: components and services give their own names.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, SequenceNode):
        for item in node.value:
            yield from _pods(item, scalar(entry(item, "name")) or name if named else name, seen, named=named)
        return
    for key, value in pairs(node):
        if key == "containers" and isinstance(value, SequenceNode):
            several = len(value.value) > 1
            for container in value.value:
                own = scalar(entry(container, "name"))
                yield _container(container, own if several and not named and own else name)
        elif key == "mainContainer":
            yield _container(value, name)
        elif key == "services" and named:
            for service, inner in pairs(value):
                yield from _pods(inner, service, seen, named=True)
        elif key not in ("initContainers", "frontendSidecar"):
            yield from _pods(value, scalar(entry(value, "metadata", "name")) or name, seen, named=named)


def _container(node: Node, name: str) -> Container:
    return Container(
        name, node, entry(node, "image"), entry(node, "command"), entry(node, "args"), entry(node, "env"), (), False
    )


def _servers(container: Container, source: Source, variables: dict[str, str]) -> list[Server]:
    image = _text(container.image, source, container, variables)
    env, names = _environment(container, source, variables)
    entrypoint = _arguments(container.entrypoint, container, source, variables, env)
    rest = _arguments(container.command, container, source, variables, env)
    found = container_servers(image, rest, source, entrypoint, env)
    return [
        replace(
            s,
            image=image,
            name=container.name,
            env=names,
            ports=container.ports,
            offset=s.offset or span(container.owner)[0],
            context="compose" if container.compose else "kubernetes",
        )
        for s in found
    ]


def _text(node: Node | None, source: Source, container: Container, variables: dict[str, str]) -> str:
    if not isinstance(node, ScalarNode):
        return ""
    chars = chars_of(node, source)
    return text_of(compose_chars(chars, variables)[0]) if container.compose else text_of(chars)


def _arguments(
    node: Node | None, container: Container, source: Source, variables: dict[str, str], env: Variables
) -> list[Arg]:
    """The words of a command or entry point, a list or (compose) a string."""
    locked = _locked(node, container, source)

    def filled(item: ScalarNode, flow: bool) -> tuple[Chars, tuple[str, ...]]:
        chars = chars_of(item, source, flow=flow)
        return compose_chars(chars, variables) if container.compose else kubernetes_chars(chars, env)

    if isinstance(node, SequenceNode):
        ctx = Doubled("$") if container.compose else FILE
        home = Home("flow" if node.flow_style else "block", ctx, locked=locked)
        as_json = source.text.lstrip().startswith("{")
        out: list[Arg] = []
        for item in node.value:
            place = _item_span(item, source)
            home.items.append(place)
            if not isinstance(item, ScalarNode):
                raise source.error(place[0], "an entry of the command is no text.", "Write each argument as one text.")
            home.quotes.append("json" if as_json else item.style if item.style in ("'", '"') else "")
            chars, unknown = filled(item, bool(node.flow_style))
            out.append(Arg(tuple(chars), home, place, unknown))
        return out
    if not isinstance(node, ScalarNode) or not scalar(node).strip():
        return []
    chars, _ = filled(node, False)
    code = [Char(" ", c.start, c.end, c.ctx) if c.c == "\n" else c for c in chars]
    words = [w for command in commands(read_shell(code, source), chars[0].ctx, Variables()) for w in command]
    filled_in = compose_spans(chars_of(node, source)) if container.compose else []
    for home in {id(w.home): w.home for w in words}.values():
        home.locked = locked
        home.items = [_widened(item, filled_in) for item in home.items]
    return [replace(w, span=_widened(w.span, filled_in)) for w in words]


def _widened(place: tuple[int, int], spans: list[tuple[int, int]]) -> tuple[int, int]:
    """The place of a word with the whole of each ``${...}`` it begins, ends or holds."""
    touching = [s for s in spans if s[0] < place[1] and place[0] < s[1]]
    return min([place[0], *(s[0] for s in touching)]), max([place[1], *(s[1] for s in touching)])


def _item_span(item: Node, source: Source) -> tuple[int, int]:
    start, end = span(item)
    if isinstance(item, ScalarNode) and item.style in ("|", ">"):
        end = start + len(source.text[start:end].rstrip())
    return start, end


def _locked(node: Node | None, container: Container, source: Source) -> str:
    """Why this command must not be changed: other places share it through a YAML anchor."""
    if node is None:
        return ""
    own, place = span(container.owner), span(node)
    anchor = getattr(node, "anchor", None) or getattr(container.owner, "anchor", None)
    inside = own[0] <= place[0] and place[1] <= own[1]
    used = anchor and re.search(rf"\*{re.escape(str(anchor))}\b", source.text)
    items = node.value if isinstance(node, SequenceNode) else []
    foreign = [i for i in items if not place[0] <= i.start_mark.index <= place[1]]
    if inside and not used and not foreign:
        return ""
    line = source.line(place[0])
    return f"its command comes from a YAML anchor (line {line}) that other places share"


def _environment(container: Container, source: Source, variables: dict[str, str]) -> tuple[Variables, tuple[str, ...]]:
    """The container's own variables, and their names."""
    env, names = Variables(), list[str]()
    node = container.env
    entries: list[tuple[str, Node | None]] = []
    if isinstance(node, MappingNode):
        entries = list(pairs(node))
    for item in node.value if isinstance(node, SequenceNode) else []:
        if isinstance(item, ScalarNode):
            names.append(scalar(item).partition("=")[0])
        else:
            entries.append((scalar(entry(item, "name")), entry(item, "value")))
    for name, value in entries:
        names.append(name)
        if isinstance(value, ScalarNode):
            chars, unknown = chars_of(value, source), tuple[str, ...]()
            if container.compose:
                chars, unknown = compose_chars(chars, variables)
            if not unknown:
                uses = len(re.findall(rf"\b{re.escape(name)}\b", source.text))
                env.set(name, chars, shared=uses > 2)
    return env, tuple(names)


def _ports(node: Node | None) -> tuple[str, ...]:
    if not isinstance(node, SequenceNode):
        return ()
    out = []
    for item in node.value:
        if isinstance(item, ScalarNode):
            out.append(scalar(item))
        else:
            out.append(f"{scalar(entry(item, 'published'))}:{scalar(entry(item, 'target'))}")
    return tuple(out)
