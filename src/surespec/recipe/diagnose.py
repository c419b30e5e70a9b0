"""What goes wrong with the JSON of ``--speculative-config``, and what was meant.

The kinds of damage are those of public reports (wrappers that escape quotes, literal quotes around the value, a
template's doubled braces, misspelt keys, the value given to another flag).
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from surespec.dialects.vllm import field_problem, method_problem
from surespec.json_text import loads_json
from surespec.recipe.base import Diagnosis
from surespec.recipe.flags import SPEC_FLAG, Flag, Parsed
from surespec.recipe.text import Source
from surespec.rules import load_topic

WILL_REPLACE = "A patch writes it anew."
_SPEC_KEYS = {"num_speculative_tokens", "draft_tensor_parallel_size", "prompt_lookup_max", "speculative_config"}


class Reading(NamedTuple):
    """A value as it was probably meant (None: no idea), with what is wrong with its spelling as (name, words)."""

    config: dict[str, Any] | None
    faults: tuple[tuple[str, str], ...]


def read_json(text: str, unknown: tuple[str, ...] = ()) -> Reading:
    """The config in a flag's value. ``unknown`` are parts of it that only running the recipe would tell."""
    plain = text
    for part in unknown:  # a variable where JSON has a bare value, as in "num_speculative_tokens": $K
        plain = re.sub(r"([:\[,]\s*)" + re.escape(part), lambda m, p=part: m[1] + json.dumps(p), plain)  # type: ignore[misc]
    config = _loads(plain)
    if config is not None:
        return Reading(config, ())
    if unknown and text.strip() in unknown:
        return Reading(None, (("computed", f"{SPEC_FLAG} is computed when the recipe runs: {text.strip()}."),))
    faults: list[tuple[str, str]] = []
    for name, words, mend in _MENDS * 2:
        mended = mend(plain)
        if mended != plain:
            plain = mended
            faults.append((name, words))
            config = _loads(plain)
            if config is not None:
                return Reading(config, tuple(faults))
    return Reading(None, (("not-json", f"the value of {SPEC_FLAG} is no JSON object ({_json_error(text)})."),))


def _loads(text: str) -> dict[str, Any] | None:
    try:
        value = loads_json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json_error(text: str) -> str:
    try:
        value = loads_json(text)
    except ValueError as error:
        detail = str(error)
        return detail[0].lower() + detail[1:]
    except RecursionError:
        return "nested too deeply"
    return f"it is a {type(value).__name__}"


def _strip_quotes(text: str) -> str:
    inner = text.strip()
    return inner[1:-1] if len(inner) > 1 and inner[0] == inner[-1] and inner[0] in "'\"`" else text


def _undouble(text: str) -> str:
    return text.replace("{{", "{").replace("}}", "}") if text.strip().startswith("{{") else text


def _unescape(text: str) -> str:
    return re.sub(r'\\([{}\[\]":,])', r"\1", text)


def _straighten(text: str) -> str:
    return re.sub("[“”„]", '"', re.sub("[‘’]", "'", text))


def _from_python(text: str) -> str:
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    try:
        return json.dumps(value) if isinstance(value, dict) else text
    except (TypeError, ValueError):  # bytes, sets: Python, and no JSON
        return text


def _requote(text: str) -> str:
    """Put back the double quotes a shell took: {method:eagle3,num_speculative_tokens:5}."""
    if '"' in text or not text.strip().startswith("{"):
        return text

    def word(found: re.Match[str]) -> str:
        token = found[0].strip()
        return token if re.fullmatch(r"-?\d+(\.\d+)?|true|false|null", token) else json.dumps(token)

    return re.sub(r"[^{}\[\]:,\s][^{}\[\],:]*(?:(?<=\w):(?=//)[^{}\[\],]*)?", word, text)


_MENDS: tuple[tuple[str, str, Callable[[str], str]], ...] = (
    ("quoted-json", f"the value of {SPEC_FLAG} has quotes inside its quotes, so the engine sees them.", _strip_quotes),
    ("escaped-json", f"the value of {SPEC_FLAG} reaches the engine with backslashes before its quotes.", _unescape),
    ("doubled-braces", f"the braces of {SPEC_FLAG} are doubled, as a template would write them.", _undouble),
    ("curly-quotes", f"the value of {SPEC_FLAG} has typographic quotes, which are not JSON's.", _straighten),
    ("python-json", f"the value of {SPEC_FLAG} is a Python dict, not JSON.", _from_python),
    (
        "lost-quotes",
        f"the shell takes the value of {SPEC_FLAG} apart: it needs single quotes around it.",
        _requote,
    ),
)


def flag_faults(flag: Flag, reading: Reading, source: Source) -> Iterator[Diagnosis]:
    """The spelling faults of one flag, with its line."""
    for name, words in reading.faults:
        fix = WILL_REPLACE
        if name == "computed":
            fix = "It cannot be patched safely: change it where it is computed."
        yield Diagnosis(name, source.line(flag.arg.span[0]), words, fix)


def config_faults(config: dict[str, Any], line: int, version: str) -> Iterator[Diagnosis]:
    """Unknown, misspelt and too new keys, impossible values."""
    fields = load_topic("vllm_fields")["field"]
    for key in config:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.6)
            meant = f"Write {near[0]!r}." if near else "Remove it."
            yield Diagnosis("unknown-key", line, f"{key!r} is no key of {SPEC_FLAG}.", meant)
        elif problem := field_problem(key, version):
            yield Diagnosis("version", line, f"{key!r} {problem}, and the image is {version}.", "Remove it.")
    method = config.get("method")
    if isinstance(method, str) and not method.startswith("$"):
        known = load_topic("vllm_fields")["method"]
        if method not in known and not method.endswith("_mtp"):
            near = difflib.get_close_matches(method.lower().replace("-", ""), known, n=1, cutoff=0.6)
            meant = f"Write {near[0]!r}." if near else f"It is one of {', '.join(known)}."
            yield Diagnosis("unknown-method", line, f"{method!r} is no speculative method of vLLM.", meant)
        elif version and method in known and (problem := method_problem(method, version)):
            yield Diagnosis("version", line, f"{problem}.", "Use another image or another method.")
    k = config.get("num_speculative_tokens")
    if isinstance(k, (bool, float)) or (isinstance(k, int) and k < 1):
        yield Diagnosis("bad-k", line, f"num_speculative_tokens is {k!r}.", "It must be a whole number from 1 on.")
    elif isinstance(k, str) and not k.startswith("$"):
        yield Diagnosis("bad-k", line, f"num_speculative_tokens is the text {k!r}.", "Write the number without quotes.")


def misplaced(parsed: Parsed, source: Source) -> list[tuple[Flag, dict[str, Any], Diagnosis]]:
    """Other flags that were given a speculative config, with that config."""
    found = []
    for flag in parsed.flags:
        if flag.name.startswith(SPEC_FLAG) or "{" not in (flag.value or ""):
            continue
        config = read_json(flag.value or "").config
        if config is None or not _SPEC_KEYS & config.keys():
            continue
        inner = config.get("speculative_config")
        meant = inner if isinstance(inner, dict) else config
        sentence = f"the speculative config is given to {flag.name}, where it does nothing."
        fix = f"It belongs to {SPEC_FLAG}; a patch moves it."
        found.append((flag, meant, Diagnosis("wrong-flag", source.line(flag.arg.span[0]), sentence, fix)))
    return found
