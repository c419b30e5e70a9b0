"""What ``tune`` does about a server of the user's that runs already: refuse, stop and start again, or replace."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surespec.core import Judgement
from surespec.engines.existing import Existing, find_existing, refuse_existing
from surespec.engines.handover import HandOver
from surespec.engines.server_lines import program_place
from surespec.errors import SurespecError, UsageError
from surespec.recipe.base import Recipe
from surespec.recipe.patch import patch_recipe
from surespec.recipe.read import read_text
from surespec.recipe.text import Source
from surespec.tune_plan import TunePlan


def check_existing(plan: TunePlan) -> tuple[Existing, ...]:
    """The servers to stop for this run. Raises EngineError when one runs that may or can not be stopped.

    The embedded engine is small and runs on the CPU, so it may run beside others; a managed endpoint is the user's.
    """
    options = plan.options
    if options.engine == "local" or options.managed:
        return ()
    found = find_existing()
    refuse_existing(found, stop=options.stop_existing)
    if options.apply:
        _check_replaceable(found, options.engine, plan.commands["baseline"])
    return found


def leave_running(hand_over: HandOver, judgement: Judgement, tell: Callable[[str], None]) -> None:
    """On keep, the old server with the new setting takes its own place; otherwise it comes back as it was."""
    if judgement.verdict != "keep" or judgement.speculative_config is None:
        tell(f"The verdict is {judgement.verdict}, so nothing is applied and the server that ran before comes back.")
        return
    try:
        argv = with_speculation(hand_over.servers[0].argv, judgement.speculative_config)
    except SurespecError as error:
        tell(f"The new setting cannot be written into the old command ({error.message.rstrip('.')}).")
        return
    hand_over.apply(argv)


def with_speculation(argv: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """A running server's own command with this speculation instead of its own; all else stays.

    Raises InputFileError or UsageError when the command cannot be read or changed.
    """
    read, head, module = _read(argv)
    changed = shlex.split(patch_recipe(read, config).text)
    return [*head, *changed[module:]]


def _read(argv: Sequence[str]) -> tuple[Recipe, list[str], int]:
    """The command as a recipe, the words before its own arguments, and how many words of the recipe those stand for."""
    place = program_place(argv)
    words = list(argv[place:])
    words = ["python", *words] if words[0] == "-m" else [words[0].rsplit("/", 1)[-1], *words[1:]]
    source = Source("the running server's command", shlex.join(words) + "\n")
    return read_text(Path("command.sh"), source), list(argv[: place + 1]), len(words) - len(argv) + place + 1


def _check_replaceable(found: Sequence[Existing], engine: str, baseline: str) -> None:
    """Raise UsageError where --apply could not put a new server in the old one's place."""
    if len(found) != 1:
        raise UsageError(
            f"--apply replaces one running server, and {len(found)} run here.",
            hint="Leave --apply out; the exact command is printed at the end.",
        )
    if found[0].container is not None:
        raise UsageError(
            f"--apply cannot change the container {found[0].container.name}, whose command is fixed.",
            hint="Leave --apply out, and start it anew with the printed setting.",
        )
    if found[0].engine != engine:
        raise UsageError(
            f"--apply: {found[0].label} is no {engine} server, so it cannot take the new setting.",
            hint="Leave --apply out, or give the --engine that runs.",
        )
    model = _read(found[0].argv)[0].model
    tuned = shlex.split(baseline)
    if not any(model == word or (os.path.exists(model) and os.path.realpath(model) == word) for word in tuned):  # noqa: PTH110
        raise UsageError(
            f"--apply: {found[0].label} serves {model or 'a model its command does not name'}, not the one tuned here.",
            hint="Leave --apply out, or give the same --model.",
        )


__all__ = ["check_existing", "leave_running", "with_speculation"]
