"""Change the speculation of a recipe, and as little else as possible.

A patch is a set of edits of the file's text. Before it is handed out, the patched text is read again: it must say what
was asked for and, in every other flag, what it said before. Where no way of writing it passes that test, the patch is
refused with the flag to add by hand.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surespec.errors import ConfigError, InputFileError, SurespecError
from surespec.recipe.base import Patched, Recipe
from surespec.recipe.diagnose import config_faults
from surespec.recipe.dialect_flags import by_hand, is_tuning, spec_flags
from surespec.recipe.edits import add_flags, remove_args, replace_value, value_chars
from surespec.recipe.flags import SPEC_FLAG, Flag, dialect
from surespec.recipe.jsontext import change_keys, compact, same
from surespec.recipe.locate import Server
from surespec.recipe.read import MEMORY_FLAG, read_text
from surespec.recipe.speculation import Found, find, gate_version
from surespec.recipe.text import Edit, Source, UnwritableError, apply_edits

C5_STEP = 0.05
_MODES = ("keys", "chars", "word", "anew")
Wanted = dict[str, str | None]


@dataclass(frozen=True)
class _Change:
    """What the patched recipe has to say: the flags set beside speculation, and those left as they were."""

    config: dict[str, Any] | None
    others: Wanted
    notes: list[str]


def patch_recipe(
    recipe: Recipe,
    speculative: Mapping[str, Any] | None,
    *,
    gpu_memory_utilization: float | None = None,
    lower_utilization: bool = True,
    other_flags: Mapping[str, str | None] | None = None,
) -> Patched:
    """The recipe with this speculative config (vLLM's words; None removes speculation).

    ``gpu_memory_utilization`` sets that value; without it, rule C5 takes 0.05 off the recipe's own when speculation is
    first added (not with ``lower_utilization`` False). ``other_flags`` are set too (None: a switch). A doubled entry
    point is mended. Raises InputFileError, with what to add by hand, where the file cannot be patched safely.
    """
    source = recipe.source
    _check(recipe, speculative)
    spec = find(recipe.parsed, recipe.engine, recipe.engine_version, source)
    change = _change(recipe, spec, speculative, gpu_memory_utilization, lower_utilization, other_flags or {})
    reasons: list[str] = []
    for mode in _MODES:
        notes = list(change.notes)
        try:
            edits = _entry_edits(recipe.server, notes, source) + _spec_edits(recipe, spec, change, mode, notes)
            text = apply_edits(source.text, edits)
            if text != source.text:
                _verify(recipe, change, text)
            elif _must_change(recipe, spec, change):
                raise UnwritableError("nothing would change")
        except (UnwritableError, ValueError, RecursionError, InputFileError) as error:
            reasons.append(error.message if isinstance(error, SurespecError) else str(error))
            continue
        return _patched(recipe, text, notes)
    raise _refusal(recipe, change, reasons)


def _check(recipe: Recipe, speculative: Mapping[str, Any] | None) -> None:
    """Refuse a config the engine would refuse, and a command that is broken before anything is written into it."""
    for diagnosis in recipe.diagnoses:
        if diagnosis.name in ("broken-continuation", "comment-in-command", "lost-flags"):
            message = f"{recipe.source.name}, line {diagnosis.line}: {diagnosis.sentence}"
            raise InputFileError(message, hint=diagnosis.fix)
    if speculative is None or dialect(recipe.engine) != "vllm":
        return
    for diagnosis in config_faults(dict(speculative), 0, gate_version(recipe.engine, recipe.engine_version)):
        if diagnosis.name != "version":
            raise ConfigError(f"speculative config: {diagnosis.sentence}", hint=diagnosis.fix)


def _change(
    recipe: Recipe,
    spec: Found,
    speculative: Mapping[str, Any] | None,
    utilization: float | None,
    lower: bool,
    other_flags: Mapping[str, str | None],
) -> _Change:
    notes: list[str] = []
    if speculative and dialect(recipe.engine) == "vllm":
        faults = config_faults(dict(speculative), 0, gate_version(recipe.engine, recipe.engine_version))
        notes += [f"Careful: {d.sentence}" for d in faults]
    others: Wanted = dict(other_flags)
    name = MEMORY_FLAG.get(dialect(recipe.engine), "")
    now = recipe.gpu_memory_utilization
    if utilization is None and lower and speculative and not spec.flags and now is not None:
        utilization = min(now, max(C5_STEP, round(now - C5_STEP, 4)))
        if utilization < now:
            change = f"from {_number(now)} to {_number(utilization)}"
            notes.append(f"C5: {name} {change}, because speculation is first added here.")
    elif utilization is None and speculative and spec.flags and now is not None:
        notes.append(f"C5: the recipe speculates already, so {name} stays {_number(now)}.")
    elif utilization is None and lower and speculative and not spec.flags and name:
        notes.append(
            f"C5: the recipe names no {name}, so the engine's own default stays; speculation needs room beside it. "
            "surespec plan --recipe says the value, apply --gpu-memory-utilization writes it."
        )
    if utilization is not None and name and now != utilization:
        others[name] = _number(utilization)
    if speculative is None and spec.flags and name and now is not None:
        notes.append(
            f"{name} stays {_number(now)}; if it was lowered for speculation, surespec undo brings the old file back."
        )
    return _Change(dict(speculative) if speculative else None, others, notes)


def _number(fraction: float) -> str:
    """Two digits at least: 0.80."""
    return f"{fraction:.4f}".rstrip("0").ljust(4, "0")


def _spec_edits(recipe: Recipe, spec: Found, change: _Change, mode: str, notes: list[str]) -> list[Edit]:
    source, args = recipe.source, recipe.server.args
    edits: list[Edit] = []
    added: list[tuple[str, str | None]] = []
    if any(d.name == "computed" for d in spec.diagnoses):
        raise UnwritableError("it is computed by a program when the recipe runs")
    if _must_change(recipe, spec, change):
        edits += _respell(recipe, spec, change, mode, added)
    elif change.config and not spec.flags:
        added += spec_flags(recipe.engine, change.config, recipe.parsed)
    for name, value in change.others.items():
        present = recipe.parsed.last(name)
        if present is None:
            added.append((name, value))
        elif value is not None and present.value != value:
            edits += _set(present, value, source)
    if added:
        kept = [a for a in args if not any(e.start <= a.span[0] and a.span[1] <= e.end and not e.new for e in edits)]
        edits += add_flags(kept or args, added, source)
        later = _passed_on(recipe)
        if later:
            notes.append(f"{later} comes after it and may set it again when the recipe runs.")
    lost = sorted({u for f in spec.flags for u in f.unknown}) if edits and mode in ("word", "anew") else []
    if lost and change.config:
        notes.append(f"{', '.join(lost)} in the old value gave way to fixed values.")
    for flag in spec.flags:
        if edits and flag.arg.conditional:
            notes.append(f"line {source.line(flag.arg.span[0])} stands under a condition, which is left as it is.")
            break
    return edits


def _passed_on(recipe: Recipe) -> str:
    """Words after the last known argument, which only running the recipe would tell."""
    last = recipe.server.args[-1] if recipe.server.args else None
    if last is None or last.home.kind != "shell" or last.span not in last.home.items:
        return ""
    following = last.home.items[last.home.items.index(last.span) + 1 :]
    return " ".join(recipe.source.text[a:b] for a, b in following)


def _must_change(recipe: Recipe, spec: Found, change: _Change) -> bool:
    """Whether the speculation that is there says something else, or says it in a way that no longer works."""
    if not spec.flags:
        return False
    if change.config is None or dialect(recipe.engine) == "vllm":
        outdated = any(d.name == "legacy-flags" for d in spec.diagnoses)
        return not same(spec.config, change.config) or spec.broken or outdated
    wanted = dict(spec_flags(recipe.engine, change.config, recipe.parsed))
    now = {f.name: f.value for f in spec.flags if f.name in wanted or not is_tuning(f.name, change.config)}
    return now != wanted


def _respell(
    recipe: Recipe, spec: Found, change: _Change, mode: str, added: list[tuple[str, str | None]]
) -> list[Edit]:
    """Replace the flags that speculate now by the wanted ones; the value of a JSON flag changes where it stands."""
    source = recipe.source
    if change.config is None:
        return remove_args([a for f in spec.flags for a in f.args], source)
    if dialect(recipe.engine) != "vllm":
        return _reflag(recipe, spec, change.config, added)
    keep = next((f for f in reversed(spec.flags) if f.name == SPEC_FLAG), None)
    if mode == "anew" or keep is None or keep.value is None:
        added += spec_flags(recipe.engine, change.config, recipe.parsed)
        return remove_args([a for f in spec.flags for a in f.args], source)
    edits = remove_args([a for f in spec.flags if f is not keep for a in f.args], source)
    if mode == "keys":
        if any(a.shared for a in keep.args):
            raise UnwritableError("parts of it are used elsewhere")
        return edits + change_keys(value_chars(keep), change.config)
    return edits + replace_value(keep, compact(change.config), mode, source)


def _reflag(recipe: Recipe, spec: Found, config: Mapping[str, Any], added: list[tuple[str, str | None]]) -> list[Edit]:
    """SGLang and llama.cpp: keep flags that stay (and the drafter's own tuning), change values, add and remove."""
    wanted = dict(spec_flags(recipe.engine, config, recipe.parsed))
    edits: list[Edit] = []
    for flag in spec.flags:
        if flag.name not in wanted:
            edits += [] if is_tuning(flag.name, config) else remove_args(flag.args, recipe.source)
            continue
        value = wanted.pop(flag.name)
        if value is not None and flag.value != value:
            edits += _set(flag, value, recipe.source)
    added += wanted.items()
    return edits


def _set(flag: Flag, value: str, source: Source) -> list[Edit]:
    """Another value where the old one's characters stand, else where the argument stands."""
    try:
        return replace_value(flag, value, "chars", source)
    except UnwritableError:
        return replace_value(flag, value, "word", source)


def _entry_edits(server: Server, notes: list[str], source: Source) -> list[Edit]:
    """Mend a program given to an image that starts it already: name it with --entrypoint, or (YAML) drop it."""
    head = server.head
    if not server.entry or head is None:
        return []
    built_in = " ".join(server.entry)
    subcommand = head.text == server.entry[-1] and len(server.entry) > 1  # `IMAGE serve MODEL`
    program = server.entry[0] if subcommand else head.text
    if server.docker is not None:
        place = server.docker.image.span[0]
        following = next((s for s in head.home.items if s[0] >= head.span[1]), None)
        if head.home is not server.docker.image.home or following is None:
            raise UnwritableError(f"the image starts `{built_in}` by itself and is given {head.text} as well")
        notes.append(
            f"{server.image} starts `{built_in}` by itself and is given {head.text} as well; the patch starts it "
            f"with --entrypoint {program}, which is right for every image."
        )
        option = head.home.ctx.encode(f"--entrypoint {shlex.quote(program)} ")
        insert = Edit(place, place, option)
        return [insert] if subcommand else [insert, Edit(head.span[0], following[0], "")]
    if not subcommand and tuple(a.text for a in server.program) != server.entry:
        raise UnwritableError(f"the image starts `{built_in}` by itself and is given {head.text} as well")
    notes.append(f"{server.image} starts `{built_in}` by itself, so it is given twice; the patch takes it out.")
    return remove_args(server.program, source)


def _verify(recipe: Recipe, change: _Change, text: str) -> None:
    """Read the patched text: the wanted config, the wanted flags, all else unchanged. Raises UnwritableError."""
    again = read_text(recipe.path, Source(recipe.source.name, text), index=recipe.index)
    spec = find(again.parsed, again.engine, again.engine_version, again.source)
    if not _as_wanted(recipe, spec, change.config, again):
        raise UnwritableError("it would not be read back as it was meant")
    before, after = _plain_flags(recipe), _plain_flags(again)
    for name, value in change.others.items():
        before[name] = after[name] if value is not None and after.get(name) == value else value
    if before != after:
        changed = sorted({k for k in before.keys() | after.keys() if before.get(k) != after.get(k)})
        raise UnwritableError(f"it would change {', '.join(changed)} too")
    if (again.model, again.image, again.engine) != (recipe.model, recipe.image, recipe.engine):
        raise UnwritableError("it would change what is served")


def _as_wanted(recipe: Recipe, spec: Found, config: Mapping[str, Any] | None, again: Recipe) -> bool:
    if config is None:
        return not spec.flags
    if dialect(recipe.engine) == "vllm":
        return same(spec.config, config) and not spec.broken and len(spec.flags) == 1
    now = {f.name: f.value for f in spec.flags}
    return all(now.get(n) == v for n, v in spec_flags(recipe.engine, config, again.parsed))


def _plain_flags(recipe: Recipe) -> dict[str, Any]:
    """The flags that do not speculate; a flag given a config by mistake is one that does."""
    spec = find(recipe.parsed, recipe.engine, recipe.engine_version, recipe.source)
    names = {f.name for f in spec.flags}
    plain: dict[str, Any] = {}
    for flag in recipe.parsed.flags:
        if flag.name not in names:
            plain[flag.name] = flag.value
    return plain


def _patched(recipe: Recipe, text: str, notes: Sequence[str]) -> Patched:
    name = recipe.path.name
    lines = difflib.unified_diff(
        recipe.source.text.splitlines(keepends=True), text.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    shown = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return Patched(recipe.source.bytes_(text), text, shown, tuple(notes) if text != recipe.source.text else ())


def _refusal(recipe: Recipe, change: _Change, reasons: Sequence[str]) -> InputFileError:
    source = recipe.source
    spec = find(recipe.parsed, recipe.engine, recipe.engine_version, source)
    place: Flag | None = spec.flags[0] if spec.flags else None
    offset = place.arg.span[0] if place else recipe.server.offset
    locked = next((a.home.locked for a in recipe.server.args if a.home.locked), "")
    why = locked or (reasons[-1] if reasons else "no place was found")
    what = f"the speculation of this recipe cannot be changed safely: {why}."
    return source.error(offset, what, by_hand(recipe.engine, change.config, change.others))
