"""The commands ``apply`` and ``undo``: flags -> calls -> output and exit code."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from surespec.errors import UsageError
from surespec.json_text import dumps_json, loads_json

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def apply_command(
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="The folder of a surespec tune.")] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="The file that starts the deployment.")] = None,
    speculative_config: Annotated[
        str, typer.Option("--speculative-config", help="Write this JSON instead of a verdict's; none removes it.")
    ] = "",
    service: Annotated[str, typer.Option("--service", help="Which server, where the file starts several.")] = "",
    gpu_memory_utilization: Annotated[
        float | None, typer.Option("--gpu-memory-utilization", min=0.05, max=1.0, help="Default: rule C5.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the diff, write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the found setting into your recipe. Shows a diff and keeps the old file; surespec undo puts it back."""
    from surespec.apply import decision, plan_apply, write
    from surespec.engines.log_tail import redact, remember_secrets
    from surespec.recipe.command import secrets_of

    config: dict[str, Any] | None
    path, utilization, folder, stale = recipe, gpu_memory_utilization, None, False
    if speculative_config:
        config = _config(speculative_config)
    elif directory is not None:
        decided = decision(directory)
        config, path = decided.speculative_config, recipe or decided.recipe
        stale = recipe is None and decided.changed_since()
        service = service or (decided.service or "" if recipe is None else "")
        utilization = utilization if utilization is not None else decided.gpu_memory_utilization
    else:
        raise UsageError("apply: nothing to write.", hint="Give the folder of a tune, or --speculative-config JSON.")
    if directory is not None:
        folder = directory / "recipe"
    if path is None:
        raise UsageError("apply: no recipe.", hint="The tune was run without one; name it with --recipe FILE.")
    applied = plan_apply(path, config, folder=folder, service=service or None, gpu_memory_utilization=utilization)
    remember_secrets(secrets_of(applied.recipe, os.environ))
    found = [f"{applied.recipe.path}, {d}" for d in applied.recipe.diagnoses]
    if stale and applied.patched.changed:
        found.append(
            f"Careful: {applied.recipe.path} was changed since it was measured; the verdict is of the old one."
        )
    for line in [*found, *applied.patched.notes]:
        print(line, file=sys.stderr)
    if not as_json:
        sys.stdout.write(redact(applied.patched.diff).encode("utf-8", "replace").decode("utf-8"))
        sys.stdout.flush()
    written = not dry_run and applied.patched.changed
    if written and not yes and not as_json:
        if not sys.stdin.isatty():
            raise UsageError("apply: nobody can be asked here.", hint="Give --yes to write it, --dry-run to look only.")
        written = typer.confirm("Write it?", default=False, err=True)
    if written:
        write(applied)
    if as_json:
        document = {**applied.document(), "diff": redact(applied.patched.diff), "written": written}
        sys.stdout.write(dumps_json(document))
        sys.stdout.write("\n")
    elif not applied.patched.changed:
        print(f"{path} says this already; nothing to write.", file=sys.stderr)
    elif not written:
        print("Nothing was written.", file=sys.stderr)
    else:
        undo = shlex.quote(str(directory or path))
        print(f"Written. The old recipe is {applied.folder / 'original'}; surespec undo {undo}", file=sys.stderr)


def undo_command(
    place: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="The folder of a surespec tune, or the recipe.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", help="The recipe, as for apply.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Also where the kept file differs by more than apply's change.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Put the recipe back as it was before surespec apply, byte for byte."""
    from surespec.apply import undo
    from surespec.engines.log_tail import redact

    if (place is None) == (recipe is None):
        raise UsageError("undo: name one thing to undo.", hint="The folder of a tune, or --recipe FILE.")

    def ask(recipe: Path, now: bytes, original: bytes) -> bool:
        if yes or as_json or not sys.stdin.isatty():
            return yes
        before, after = (x.decode("utf-8", "backslashreplace").splitlines(keepends=True) for x in (now, original))
        for line in difflib.unified_diff(before, after, f"{recipe} now", f"{recipe} afterwards"):
            sys.stderr.write(redact(line))
        return typer.confirm(f"This changes more than the speculation. Write {recipe}?", default=False, err=True)

    path, changed = undo(place or recipe or Path(), ask=ask)
    if as_json:
        sys.stdout.write(dumps_json({"schema": "surespec/undo/1", "recipe": str(path), "changed": changed}))
        sys.stdout.write("\n")
    else:
        print(f"{path} is as it was." if changed else f"{path} is as it was already.")


def _config(text: str) -> dict[str, Any] | None:
    if text == "none":
        return None
    try:
        value = loads_json(text)
    except ValueError as error:
        raise UsageError(f"--speculative-config: no JSON ({error}).", hint="Give an object, or none.") from error
    if not isinstance(value, dict) or "method" not in value:
        raise UsageError("--speculative-config: no JSON object with a method.", hint="Give an object, or none.")
    return value


__all__ = ["apply_command", "undo_command"]
