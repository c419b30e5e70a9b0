"""How valid documents are damaged: bytes, texts, and JSON as a tree.

Each mutation is a small plain function of the document and of a few drawn numbers, so that a case costs little to make
and hypothesis can shrink it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NASTY_TEXTS = (
    "", " ", "\0", "\x1b[31mred\x1b[0m", "\ufeff", "\r\n", "\u2028", "\u202e", "\x7f", "'", '"', "`", "\\", "$", "$(x)",
    "${", "${A:-", "${A:-${B:-c}}", "{{", "}}", "%", "%s", "%n", "<<EOF\n", "#", "null", "NaN", "-", "--", "=", "/", "..",
    "../../etc/passwd", "~", "漢字", "😀", "é", "A" * 2000, "9" * 5000, "1e999", "[" * 2000, "{\"a\":" * 2000, "𝟘", "९",
    "&a", "*a", "!!python/object:os.system", "? ", "<<: *a", "---\n", "\t", "()", "<(", "|", "&&", "\\\n", "-1", "0x10",
)  # fmt: skip
NASTY_BYTES = tuple(t.encode() for t in NASTY_TEXTS) + (
    b"\xff", b"\xfe\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80" * 64, b"\xff" * 8, b"\0" * 64,
    b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\xef\xbb\xbf",
)  # fmt: skip
NASTY_NUMBERS = (
    0, -1, 1, 2, 3, 7, 255, 1024, 65536, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63),
    10**18, 10**40, 10**400, 10**4400,
)  # fmt: skip
NASTY_FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308, 1e18, float("inf"), float("-inf"), float("nan"))
_DEEP: tuple[Any, ...] = ("deep list", "deep dict", "wide list")
_HOLE = "\ue000hole"


class Raw(str):
    """A piece of JSON text that is written as it stands (huge numbers, nesting that no Python object has)."""

    __slots__ = ()


def nasty_values() -> st.SearchStrategy[Any]:
    """One JSON value that a field may not expect."""
    return st.one_of(
        st.sampled_from((None, True, False, [], {}, [[]], {"": None}, [None], "x", "1", "-1", "1.5", "true")),
        st.sampled_from(NASTY_NUMBERS),
        st.sampled_from(NASTY_FLOATS),
        st.sampled_from(NASTY_TEXTS),
        st.sampled_from(("\ud800", "a\udfff", "\udc80")),
        st.sampled_from((Raw("[" * 3000 + "]" * 3000), Raw('{"a":' * 3000 + "1" + "}" * 3000), Raw("[" * 100_000))),
        st.sampled_from((Raw("9" * 5000), Raw("-" + "9" * 5000), Raw("1e99999"), Raw("1" * 400 + ".5"), Raw("NaN"))),
        st.sampled_from((Raw("[" + "1," * 3000 + "1]"), Raw("01"), Raw("'x'"), Raw(""))),
        st.integers(-5, 5000),
        st.lists(st.integers(-3, 9), max_size=4),
    )


def dump(value: Any) -> str:
    """JSON text with NaN, half surrogates, and ``Raw`` pieces as they are."""
    holes: list[str] = []

    def prepare(part: Any) -> Any:
        if isinstance(part, Raw):
            holes.append(str(part))
            return f"{_HOLE}{len(holes) - 1}"
        if isinstance(part, int) and not isinstance(part, bool) and abs(part) >= 10**4000:
            holes.append("1" + "0" * 4400)
            return f"{_HOLE}{len(holes) - 1}"
        if isinstance(part, dict):
            return {prepare_key(k): prepare(v) for k, v in part.items()}
        if isinstance(part, list | tuple):
            return [prepare(v) for v in part]
        return part

    def prepare_key(key: Any) -> str:
        return str(key)

    text = json.dumps(prepare(value))
    for index, hole in enumerate(holes):
        text = text.replace(f'"\\ue000hole{index}"', hole, 1)
    return text


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values of a JSON tree, the root first; of long lists and tables only the first few."""
    found = [at]
    if isinstance(tree, dict):
        for key in list(tree)[:40]:
            found += places(tree[key], (*at, key))
    elif isinstance(tree, list):
        for index in range(min(len(tree), 6)):
            found += places(tree[index], (*at, index))
    return found


def _parent(tree: Any, path: Sequence[Any]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def _key(value: Any) -> str:
    return "long" if isinstance(value, int) and abs(value) > 10**4000 else str(value)[:50]


def mutate_tree(tree: Any, kind: str, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with one change at ``path`` (which may no longer be there: then unchanged)."""
    if not path:
        return {"replace": value, "wrap": [tree], "nest": {"a": tree}}.get(kind, tree)
    try:
        parent, key = _parent(tree, path), path[-1]
        if kind == "replace":
            parent[key] = value
        elif kind == "delete":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[_key(value)] = parent.pop(key)
        elif kind == "add" and isinstance(parent, dict):
            parent[_key(value)] = value
        elif kind == "duplicate" and isinstance(parent, list):
            parent.extend([copy.deepcopy(parent[key])] * 3)
        elif kind == "wrap":
            parent[key] = [parent[key]]
        elif kind == "nest":
            parent[key] = {"a": parent[key]}
        elif kind == "stringify":
            parent[key] = str(parent[key])
        elif kind == "negate" and isinstance(parent[key], int | float):
            parent[key] = -parent[key]
        elif kind == "grow" and isinstance(parent[key], int | float):
            parent[key] = parent[key] * 10**9
        elif kind == "swap" and isinstance(parent, dict):
            other = next(iter(parent))
            parent[key], parent[other] = parent[other], parent[key]
    except (KeyError, IndexError, TypeError, RecursionError, OverflowError):
        pass
    return tree


KINDS = (
    "replace", "replace", "replace", "delete", "delete", "rename", "add", "duplicate", "wrap", "nest", "stringify",
    "negate", "grow", "swap",
)  # fmt: skip


@st.composite
def trees(draw: st.DrawFn, documents: Sequence[Any], most: int = 3) -> Any:
    """One of the documents with a few changes."""
    document = draw(st.sampled_from(range(len(documents))))
    tree = copy.deepcopy(documents[document])
    for _ in range(draw(st.integers(0, most))):
        found = places(tree)
        path = found[draw(st.integers(0, len(found) - 1))]
        tree = mutate_tree(tree, draw(st.sampled_from(KINDS)), path, draw(nasty_values()))
    return tree


def json_texts(documents: Sequence[Any], most: int = 3) -> st.SearchStrategy[bytes]:
    """JSON files: a damaged tree, sometimes with damaged bytes as well, or no JSON at all."""
    spelled = trees(documents, most).map(lambda tree: dump(tree).encode("utf-8", "surrogatepass"))
    return st.one_of(spelled, spelled, spelled, damaged(spelled), st.binary(max_size=80))


@st.composite
def damaged(draw: st.DrawFn, inner: st.SearchStrategy[bytes], most: int = 3) -> bytes:
    """The bytes with pieces cut out, put in, doubled, overwritten, or the end cut off."""
    data = draw(inner)
    for _ in range(draw(st.integers(1, most))):
        data = change_bytes(
            data,
            draw(st.sampled_from(("cut", "insert", "double", "overwrite", "end", "flip", "crlf", "bom", "number"))),
            draw(st.integers(0, max(0, len(data)))),
            draw(st.integers(1, 40)),
            draw(st.sampled_from(NASTY_BYTES)),
        )
    return data


def change_bytes(data: bytes, kind: str, at: int, length: int, piece: bytes) -> bytes:
    """One change of bytes at an offset."""
    if kind == "cut":
        return data[:at] + data[at + length :]
    if kind == "insert":
        return data[:at] + piece + data[at:]
    if kind == "double":
        return data[: at + length] + data[at:]
    if kind == "overwrite":
        return data[:at] + piece[:length] + data[at + min(length, len(piece)) :]
    if kind == "end":
        return data[:at]
    if kind == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ (1 << (length % 8))]) + data[at + 1 :]
    if kind == "crlf":
        return data.replace(b"\n", b"\r\n")
    if kind == "bom":
        return b"\xef\xbb\xbf" + data
    if kind == "number":
        digits = next((i for i in range(at, len(data)) if 48 <= data[i] < 58), -1)
        return data if digits < 0 else data[:digits] + b"99999999999999999999" + data[digits + 1 :]
    return data


@st.composite
def repeated(draw: st.DrawFn, pieces: Sequence[bytes], size: int = 200_000) -> bytes:
    """A long input out of one or two short pieces: what finds a reader whose time grows with the square."""
    first, second = draw(st.sampled_from(pieces)), draw(st.sampled_from(pieces))
    length = draw(st.sampled_from((size // 20, size // 4, size)))
    unit = first + draw(st.sampled_from((b"", second)))
    body = unit * (length // max(1, len(unit)))
    return draw(st.sampled_from((b"", second))) + body + draw(st.sampled_from((b"", second)))


__all__ = [
    "NASTY_BYTES", "NASTY_FLOATS", "NASTY_NUMBERS", "NASTY_TEXTS", "Raw", "change_bytes", "damaged", "dump", "json_texts",
    "mutate_tree", "nasty_values", "places", "repeated", "trees",
]  # fmt: skip
