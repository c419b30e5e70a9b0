"""What the documents show exists: every command, every flag, every link; and translations keep to their original."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from surespec.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")])
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
TRANSLATED = [
    (ROOT / "README.md", ROOT / "README.zh.md"),
    (ROOT / "README.md", ROOT / "README.ja.md"),
    (ROOT / "docs/quickstart.md", ROOT / "docs/quickstart.zh.md"),
    (ROOT / "docs/quickstart.md", ROOT / "docs/quickstart.ja.md"),
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ROOT_COMMAND = typer.main.get_command(app)


def blocks(text: str) -> list[tuple[int, str, str]]:
    """First line, language and content of each fenced block."""
    return [(text[: m.start()].count("\n") + 1, m[2], m[3]) for m in FENCE.finditer(text)]


def prose(text: str) -> str:
    """The text without its fenced blocks, whose comment lines look like headings."""
    return FENCE.sub("", text)


def commands(block: str) -> Iterator[list[str]]:
    """The words of each surespec command of a shell block: quotes, comments, continued lines, pipes, redirections."""
    token = re.compile(
        r"""(?P<space>[ \t]+|\\\n)|(?P<comment>\#[^\n]*)|(?P<end>[;&|()\n]+)|(?P<file>\d?[<>]+&?\d?)
                           |(?P<word>(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s;&|()<>'"\\])+)|(?P<open>['"])""",
        re.VERBOSE,
    )
    words: list[str] = []
    to_file = False
    for match in token.finditer(block + "\n"):
        if match["open"]:
            yield ["surespec", f"--quote-left-open:{block[match.start() :].splitlines()[0]}"]
        elif match["word"]:
            if not to_file:
                words += shlex.split(match["word"])
            to_file = False
        elif match["file"]:
            to_file = "&" not in match["file"]
        elif match["end"]:
            if words[:1] == ["surespec"]:
                yield words
            words = []


def wrong(words: list[str]) -> str:
    """What of a command does not exist; empty when all does. Nothing is run."""
    known = ROOT_COMMAND.commands  # type: ignore[attr-defined]
    rest = words[1:]
    command = ROOT_COMMAND
    if rest and not rest[0].startswith("-"):
        if rest[0] not in known:
            return f"there is no command {rest[0]!r}"
        command, rest = known[rest[0]], rest[1:]
    options = {name: p for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("-")}
    options |= dict.fromkeys(("--help", "-h"))
    taken = 0
    while rest:
        word, rest = rest[0], rest[1:]
        if not word.startswith("-"):
            taken += 1
            continue
        name, _, value = word.partition("=")
        if name not in options:
            return f"surespec {command.name} has no option {name}"
        parameter = options[name]
        if parameter is not None and not parameter.is_flag and not value:
            if not rest or rest[0].startswith("--"):
                return f"{name} has no value"
            rest = rest[1:]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    if taken > len(arguments):
        return f"surespec {command.name} takes {len(arguments)} arguments, not {taken}"
    if taken < sum(p.required for p in arguments) and "--help" not in words:
        return f"surespec {command.name} wants more arguments"
    return ""


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_command_shown_exists(document: Path) -> None:
    found = [
        f"{document.relative_to(ROOT)}, block at line {line}: {' '.join(words)}: {problem}"
        for line, language, block in blocks(document.read_text(encoding="utf-8"))
        if language in ("", "sh", "bash", "console")
        and re.search(r"^\s*surespec\s|[|&;]\s*surespec\s", block, re.MULTILINE)
        for words in commands(block)
        if (problem := wrong(words))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    text = prose(document.read_text(encoding="utf-8"))
    missing = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:|#", target):
            continue
        path, _, anchor = target.partition("#")
        place = document.parent / path
        if not place.exists():
            missing.append(target)
        elif anchor and anchor not in anchors(place):
            missing.append(f"{target} (no such heading)")
    assert not missing, f"{document.relative_to(ROOT)}: {missing}"


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as they are made on the web."""
    titles = re.findall(r"^#+ (.+)$", prose(document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("original", "translation"), TRANSLATED, ids=[str(t.relative_to(ROOT)) for _, t in TRANSLATED])
def test_a_translation_has_the_blocks_headings_and_rows_of_its_original(original: Path, translation: Path) -> None:
    """Comments in a block may be translated; everything else of it must be the same."""
    texts = [path.read_text(encoding="utf-8") for path in (original, translation)]
    problems = [*different_blocks(*texts), *different_sections(*texts)]
    assert not problems, f"{translation.name} against {original.name}:\n" + "\n".join(problems)


def different_blocks(original: str, translation: str) -> list[str]:
    """Each fenced block of the original that the translation lacks or has otherwise, with its lines."""
    theirs, ours = ([(line, bare(block)) for line, _, block in blocks(text)] for text in (original, translation))
    problems = [
        f"block {n}: line {a} of the original has\n{x}\nand line {b} of the translation has\n{y}"
        for n, ((a, x), (b, y)) in enumerate(zip(theirs, ours, strict=False), 1)
        if x != y
    ]
    if len(theirs) != len(ours):
        problems.append(f"{len(theirs)} fenced blocks in the original, {len(ours)} in the translation")
    return problems


def bare(block: str) -> str:
    """A block without its comments."""
    lines = (re.sub(r"(^|\s+)# .*$", "", line).rstrip() for line in block.splitlines())
    return "\n".join(line for line in lines if line)


def different_sections(original: str, translation: str) -> list[str]:
    """Sections that differ in level, table rows, list items, code words or links."""
    theirs, ours = sections(original), sections(translation)
    problems = []
    if len(theirs) != len(ours):
        problems.append(f"{len(theirs)} headings in the original, {len(ours)} in the translation")
    problems += [
        f"section {one['title']!r} / {other['title']!r}: {what} {one[what]!r} != {other[what]!r}"
        for one, other in zip(theirs, ours, strict=False)
        for what in ("level", "table rows", "list items", "code", "links")
        if one[what] != other[what]
    ]
    return problems


def sections(text: str) -> list[dict[str, object]]:
    """What each heading's section must have in common with its translation. Links may go to the same file of the
    other language."""
    found = []
    for part in re.split(r"^(?=#+ )", prose(text), flags=re.MULTILINE):
        if part.startswith("#"):
            links = (re.sub(r"\.(zh|ja)\.md$", ".md", link) for link in LINK.findall(part))
            found.append(
                {
                    "title": part.splitlines()[0].lstrip("# "),
                    "level": len(part) - len(part.lstrip("#")),
                    "table rows": len(re.findall(r"^\|", part, re.MULTILINE)),
                    "list items": len(re.findall(r"^ *(?:-|\d+\.) ", part, re.MULTILINE)),
                    "code": sorted(" ".join(c.split()) for c in re.findall(r"`([^`]+)`", part)),
                    "links": sorted(links),
                }
            )
    return found


def test_this_reader_of_commands_sees_what_is_wrong() -> None:
    """The checks above must be able to fail."""
    block = """export X=1   # it's set
surespec plan --nonsense   # don't
surespec frob; true && surespec judge
surespec bench --json > a.json
surespec judge a.json \\
  b.json 2>&1 | surespec tune --out
surespec apply r --speculative-config '{"method":"ngram"}
"""
    assert [wrong(words) for words in commands(block)][:5] == [
        "surespec plan has no option --nonsense",
        "there is no command 'frob'",
        "surespec judge wants more arguments",
        "",
        "",
    ]
    assert "--out has no value" in [wrong(words) for words in commands(block)]
    assert any("quote-left-open" in wrong(words) for words in commands(block))
    assert different_blocks("```\na b  # one\n```\n", "```\na b  # eins\n```\n") == []
    assert "line 1 of the original" in different_blocks("```\na b\n```\n", "```\na c\n```\n")[0]
    assert "1 fenced blocks" in different_blocks("```\na\n```\n", "")[0]
    assert "headings" in different_sections("# A\n## B\n", "# A\n")[0]
    assert "list items 2 != 1" in different_sections("# A\n- x\n- y\n", "# B\n- x\n")[0]
