"""Write a patched recipe, and put the old one back.

Beside the recipe (``RECIPE.surespec/``) or in the bundle (``DIR/recipe/``) lie ``original``, the bytes before, and
``journal.json``, what was done. The original is on disk before the recipe changes; the recipe changes by one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from surespec.errors import BundleError, InputFileError, SurespecError, UsageError
from surespec.json_text import loads_json
from surespec.recipe import Patched, Recipe, patch_recipe, read_recipe
from surespec.recipe.read import read_text
from surespec.recipe.text import Source
from surespec.store import refuse_links

SCHEMA = "surespec/apply/1"


@dataclass(frozen=True)
class Decision:
    """What a bundle's verdict says to do with the recipe: a config, or None to serve without speculation."""

    recipe: Path | None
    speculative_config: dict[str, Any] | None
    gpu_memory_utilization: float | None = None
    verdict: str = ""
    service: str | None = None
    recipe_sha256: str = ""

    def changed_since(self) -> bool:
        """Whether the recipe is no longer the one that was measured."""
        if self.recipe is None or not self.recipe_sha256 or not self.recipe.is_file():
            return False
        return _hash(_read(self.recipe)) != self.recipe_sha256


@dataclass(frozen=True)
class Applied:
    """What ``apply`` did or would do."""

    recipe: Recipe
    patched: Patched
    folder: Path
    request: Mapping[str, Any]

    def document(self) -> dict[str, Any]:
        """For JSON (schema ``surespec/apply/1``)."""
        return {
            "schema": SCHEMA,
            "recipe": str(self.recipe.path),
            "kind": self.recipe.kind,
            "engine": self.recipe.engine,
            "changed": self.patched.changed,
            "diff": self.patched.diff,
            "notes": list(self.patched.notes),
            "diagnoses": [vars(d) for d in self.recipe.diagnoses],
            "original": str(self.folder / "original") if self.patched.changed else "",
        }


def decision(bundle: Path) -> Decision:
    """Read a bundle's verdict. Raises BundleError when there is none, UsageError when it decides nothing."""
    refuse_links(bundle)
    judgement = _document(bundle / "judgement.json", "Run surespec tune to its end first.")
    manifest = _document(bundle / "manifest.json", "Name the --out folder of a surespec tune.")
    options = manifest.get("options")
    options = options if isinstance(options, dict) else {}
    recipe, service = options.get("recipe"), options.get("service")
    service = service if isinstance(service, str) else None
    path = Path(recipe) if isinstance(recipe, str) and recipe else None
    measured = str(manifest.get("recipe_sha256") or "")
    verdict = str(judgement.get("verdict", ""))
    if verdict == "disable":
        return Decision(path, None, verdict=verdict, service=service, recipe_sha256=measured)
    config = judgement.get("speculative_config")
    if verdict not in ("keep", "marginal") or not isinstance(config, dict):
        raise UsageError(
            f"{bundle}: the verdict is {verdict or 'missing'}, so there is nothing to apply.",
            hint="Measure more with --resume, or give --speculative-config yourself.",
        )
    utilization = judgement.get("gpu_memory_utilization")
    share = utilization if isinstance(utilization, float) else None
    return Decision(path, config, share, verdict, service, measured)


def plan_apply(
    recipe: Path,
    speculative: Mapping[str, Any] | None,
    *,
    folder: Path | None = None,
    service: str | None = None,
    gpu_memory_utilization: float | None = None,
) -> Applied:
    """Read and patch, write nothing. ``folder`` is where the old bytes will be kept."""
    real = _followed(recipe)
    read = read_recipe(real, service=service)
    patched = patch_recipe(read, speculative, gpu_memory_utilization=gpu_memory_utilization)
    request = {
        "speculative_config": None if speculative is None else dict(speculative),
        "gpu_memory_utilization": gpu_memory_utilization,
        "service": service,
    }
    return Applied(read, patched, folder or undo_folder(real), request)


def _followed(path: Path) -> Path:
    """The file a link leads to, so that the link stays one. Raises InputFileError for a link to itself."""
    try:
        return path.resolve() if path.is_symlink() else path
    except (OSError, RuntimeError) as error:
        raise InputFileError(f"{path} is a link that leads nowhere.", hint="Name the recipe itself.") from error


def write(applied: Applied) -> None:
    """Write the patched recipe; its old bytes go to the folder first.

    Raises UsageError when the recipe changed meanwhile, InputFileError or BundleError when a file cannot be written.
    """
    if not applied.patched.changed:
        return
    path, folder = applied.recipe.path, applied.folder
    before = applied.recipe.source.bytes_(applied.recipe.source.text)
    if _read(path) != before:
        raise UsageError(f"{path} was changed while surespec read it.", hint="Run it again.")
    journal = _journal(folder)
    follows = journal is not None and journal["recipe"] == str(path.absolute())
    follows = follows and journal is not None and journal["applied_sha256"] == _hash(before)
    if journal is not None and not follows and journal["recipe"] != str(path.absolute()):
        raise UsageError(
            f"{folder} keeps the original of another recipe, {journal['recipe']}.", hint="Undo that one first."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not follows:
            _set_aside(folder / "original", before)
            _replace(folder / "original", before)
        entry = {
            "schema": SCHEMA,
            "recipe": str(path.absolute()),
            "applied_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "original_sha256": _hash(before) if not follows or journal is None else journal["original_sha256"],
            "applied_sha256": _hash(applied.patched.data),
            "requests": [*(journal.get("requests", ()) if follows and journal is not None else ()), applied.request],
        }
        _replace(folder / "journal.json", (json.dumps(entry, indent=2) + "\n").encode())
    except OSError as error:
        hint = "Free some room, or name a folder you may write."
        raise BundleError(f"{folder} cannot be written: {error.strerror or error}.", hint=hint) from error
    try:
        _replace(path, applied.patched.data)
    except OSError as error:
        raise InputFileError(
            f"{path} cannot be written: {error.strerror or error}.", hint="It is unchanged."
        ) from error


def undo(place: Path, *, ask: Callable[[Path, bytes, bytes], bool] | None = None) -> tuple[Path, bool]:
    """Put the original bytes back. ``place``: a bundle, an undo folder, or the recipe.

    A folder may be a stranger's, and its journal names any file. So what is put back must become what is there by the
    changes that the journal lists; otherwise ``ask`` decides, given the file, its bytes and those to be put back.

    Returns the recipe and whether it changed. Raises BundleError when there is nothing to undo, UsageError when the
    recipe was changed after ``apply``, or ``ask`` is needed and does not agree.
    """
    folder = _folder_of(place)
    journal = _journal(folder)
    if journal is None:
        raise BundleError(f"{place}: nothing to undo here.", hint="Name the folder or recipe of surespec apply.")
    path = Path(journal["recipe"])
    if not (folder / "original").exists() and _hash(_read(path)) == journal["original_sha256"]:
        return path, False
    original = _read(folder / "original")
    if _hash(original) != journal["original_sha256"]:
        raise BundleError(f"{folder / 'original'} was changed, so it is not put back.", hint=f"Compare it with {path}.")
    now = _read(path)
    if now == original:
        _forget(folder / "original")
        return path, False
    if _hash(now) != journal["applied_sha256"]:
        raise UsageError(
            f"{path} was changed after surespec apply, so it is left as it is.",
            hint=f"The old recipe is {folder / 'original'}; take over what you want, or copy it back.",
        )
    if not _changes_only(path, original, now, journal.get("requests")) and not (ask and ask(path, now, original)):
        raise UsageError(
            f"{folder / 'original'} differs from {path} by more than what surespec apply does, so it is not put back.",
            hint=f"Compare them; surespec undo {shlex.quote(str(place))} --yes puts it back all the same.",
        )
    try:
        _replace(path, original)
    except OSError as error:
        raise InputFileError(
            f"{path} cannot be written: {error.strerror or error}.", hint="It is unchanged."
        ) from error
    _forget(folder / "original")
    return path, True


def _changes_only(path: Path, original: bytes, now: bytes, requests: object) -> bool:
    """Whether ``apply`` with these requests, one after the other, makes ``now`` of ``original``."""
    try:
        data = original
        for request in requests if isinstance(requests, list) else ():
            read = read_text(path, Source.decode(str(path), data), service=request["service"])
            share = request["gpu_memory_utilization"]
            data = patch_recipe(read, request["speculative_config"], gpu_memory_utilization=share).data
    except (SurespecError, LookupError, TypeError, ValueError, AttributeError):
        return False
    return data == now


def _forget(original: Path) -> None:
    """The copy may hold keys of the recipe, so it goes once it is of no more use."""
    with contextlib.suppress(OSError):
        original.unlink()


def undo_folder(recipe: Path) -> Path:
    """Where a recipe's original is kept when no bundle is given."""
    return recipe.with_name(recipe.name + ".surespec")


def _folder_of(place: Path) -> Path:
    if place.is_dir():
        refuse_links(place)
        return place / "recipe" if (place / "recipe" / "journal.json").exists() else place
    return undo_folder(_followed(place))


def _document(path: Path, hint: str) -> dict[str, Any]:
    try:
        value = loads_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BundleError(f"{path} does not exist.", hint=hint) from error
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}.", hint=hint) from error
    if not isinstance(value, dict):
        raise BundleError(f"{path} is no JSON object.", hint=hint)
    return value


def _journal(folder: Path) -> dict[str, Any] | None:
    path = folder / "journal.json"
    if not path.exists():
        return None
    value = _document(path, "Restore the recipe by hand.")
    names = ("recipe", "original_sha256", "applied_sha256")
    if value.get("schema") != SCHEMA or not all(isinstance(value.get(n), str) for n in names):
        raise BundleError(f"{path} is no journal of surespec apply.", hint="Name another folder.")
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        hint = "Restore it, then run surespec again."
        raise InputFileError(f"{path} cannot be read: {error.strerror or error}.", hint=hint) from error


def _set_aside(path: Path, new: bytes) -> None:
    """Keep an older original under another name before a new one takes its place."""
    if path.exists() and (old := _read(path)) != new:
        path.replace(path.with_name(f"{path.name}.{_hash(old)[:8]}"))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    """Write beside and rename; mode and (where allowed) owner of an existing file stay."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    beside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, beside)
            state = path.stat()
            with contextlib.suppress(OSError):
                os.chown(beside, state.st_uid, state.st_gid)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
