"""A server that someone else starts and stops: surespec says which arm is wanted and waits until it answers.

Whether it does is read from the server itself: its metrics page has speculation counters or not, with a position for
each drafted token, and the time its counters were made tells one server life from the next.
"""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surespec.core import Arm
from surespec.dialects import vllm as dialect
from surespec.dialects.base import compact_json
from surespec.dialects.versions import release
from surespec.endpoint_url import get_text, normalise_endpoint, shown
from surespec.engines.base import DEFAULT_PORT, FetchHook, RunningServer, StageHook, shell_text
from surespec.engines.failures import Failure, Moment, Remedy, classify
from surespec.engines.from_recipe import recipe_engine
from surespec.engines.pace import Pace
from surespec.errors import EngineError, SurespecError, UsageError
from surespec.probe import probe_endpoint
from surespec.recipe.base import Recipe
from surespec.recipe.patch import patch_recipe

WAIT_S = 3600.0
POLL_S = 1.0
_TIMEOUT_S = 5.0
_MAX_BYTES = 8 * 2**20
_DRAFTED = re.compile(r"^(?:vllm|llamacpp|sglang|trtllm)\S*spec_(?:decode|accept|verify)\S*", re.MULTILINE)
_POSITION = re.compile(r"^\S*accepted_tokens_per_pos\S*\{[^}]*position=\"(\d+)\"", re.MULTILINE)
_BORN = re.compile(r"^(?:process_start_time_seconds|\S+_created)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a metrics page tells of a server: whether it speculates, with which k (0: not told), and which life it is.

    ``born`` is the earliest time its counters were made; empty where the engine does not say.
    """

    speculates: bool
    k: int
    born: str

    def is_arm(self, arm: Arm) -> bool:
        """Whether this can be the arm, as far as the page tells."""
        if arm.is_baseline:
            return not self.speculates
        return self.speculates and self.k in (0, arm.num_speculative_tokens)


def read_page(page: str) -> Seen:
    """Read a metrics page in the Prometheus text format."""
    positions = [int(number) for number in _POSITION.findall(page)]
    born = [float(value) for value in _BORN.findall(page) if _is_number(value)]
    return Seen(
        speculates=_DRAFTED.search(page) is not None,
        k=max(positions) + 1 if positions else 0,
        born=str(min(born)) if born else "",
    )


class ManagedServer:
    """One life of a server that surespec neither starts nor stops."""

    def __init__(self, endpoint: str, engine: str, start_duration_s: float) -> None:
        self.endpoint = endpoint
        self.pid = 0
        self.start_duration_s = start_duration_s
        self.metrics_endpoints: tuple[str, ...] = ()
        self._engine = engine

    def alive(self) -> bool:
        """Whether it answers."""
        return _get(self.endpoint, "v1/models") is not None

    def stop(self) -> None:
        """It is not surespec's to stop."""

    def last_words(self) -> str:
        """Its log is not surespec's to read."""
        return "its log is with whoever started it"

    def failure(self, moment: Moment) -> Failure:
        """Only the moment is known."""
        return classify(self._engine, moment, None, None, [])


@dataclass(slots=True)
class ManagedEngine:
    """A server at ``endpoint`` that a person starts for each arm. ``version`` may be empty (not known)."""

    name: str
    model: str
    endpoint: str
    version: str = ""
    recipe: Recipe | None = None
    wait_s: float = WAIT_S
    sleep: Callable[[float], None] = time.sleep
    _last: Seen | None = field(default=None, init=False)

    @property
    def k_by_batch_size(self) -> bool:
        """By vLLM's table of fields."""
        return self.name == "vllm" and dialect.k_by_batch_size(self.version)

    def pace(self) -> Pace:
        """A person restarts a server in minutes; what a step costs is not known before it is measured."""
        return Pace(start_s=180.0, step_ms=25.0)

    def drafter(self, name: str) -> str:
        """What the server is told is what the user said."""
        return name

    def refusal(self, arm: Arm) -> str:
        """By the version the server names."""
        if arm.is_baseline or self.name != "vllm" or not release(self.version):
            return ""
        problem = dialect.method_problem(arm.method, self.version)
        return f"{arm.name} is left out: {problem}." if problem else ""

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """The files are with the server."""

    def mended(self, arm: Arm, remedy: Remedy) -> ManagedEngine | None:
        """Nothing can be changed from here."""
        return None

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """The command in vLLM's words; the user's own flags come beside these. With a recipe, the recipe's."""
        if self.recipe is not None:
            try:
                return recipe_engine(self.recipe).command(arm, port)
            except UsageError:
                pass  # of a kind that is no command (compose, Kubernetes): the instruction says what to change in it
        parts = urllib.parse.urlsplit(self.endpoint)
        argv = ["vllm", "serve", self.model, "--port", str(parts.port or (443 if parts.scheme == "https" else 80))]
        if (config := self._config(arm)) is not None:
            argv += ["--speculative-config", compact_json(config)]
        return argv

    def _config(self, arm: Arm) -> dict[str, Any] | None:
        if arm.speculative_config is None:
            return None
        return dict(dialect.gate(arm.speculative_config, self.version).config)

    def instruction(self, arm: Arm) -> str:
        """What a person has to do now, with the command on a line of its own, or the change of the recipe."""
        how = "without --speculative-config" if arm.is_baseline else f"as {arm.name}"
        if self.recipe is not None:
            diff = patch_recipe(self.recipe, self._config(arm)).diff
            change = f"with this change of {self.recipe.path}:\n{diff}" if diff else f"by {self.recipe.path} as it is."
            return (
                f"Now (re)start the server at {self.endpoint} {how}, {change.rstrip()}\n"
                "surespec goes on when it answers."
            )
        return (
            f"Now (re)start the server at {self.endpoint} {how}, with the other flags you use; "
            f"surespec goes on when it answers:\n  {shell_text(self.command(arm))}"
        )

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Wait until the arm answers at the endpoint. Raises EngineError after an hour; Ctrl-C is safe."""
        stage = on_stage or (lambda _text: None)
        begun = time.monotonic()
        told = ""
        while True:
            seen, problem = self._look(arm)
            if seen is not None:
                self._last = seen
                log_path.write_text(f"managed by the user at {self.endpoint}\n", encoding="utf-8")
                return ManagedServer(self.endpoint, self.name, time.monotonic() - begun)
            if problem != told:
                stage(f"waiting: {problem}")
                told = problem
            if time.monotonic() - begun > self.wait_s:
                raise EngineError(
                    f"{arm.name} did not come up at {self.endpoint} within {self.wait_s / 60:.0f} minutes: {problem}.",
                    hint="Go on later with --resume.",
                )
            self.sleep(POLL_S)

    def _look(self, arm: Arm) -> tuple[Seen | None, str]:
        """The server if it is the wanted arm, and what is still missing if not."""
        if _get(self.endpoint, "v1/models") is None:
            return None, "nothing answers"
        page = _get(self.endpoint, "metrics")
        if page is None:
            return None, "its /metrics does not answer, so the arm cannot be told"
        seen = read_page(page)
        if not seen.is_arm(arm):
            found = f"drafting {seen.k or 'some'} tokens" if seen.speculates else "without speculation"
            return None, f"the server there runs {found}"
        if self._last is not None and seen.born and seen.born == self._last.born:
            return None, "the server there was not restarted since the last launch"
        return seen, ""


def managed_engine(engine: str, model: str, endpoint: str, recipe: Recipe | None = None) -> ManagedEngine:
    """The engine behind an endpoint; its version is asked for if it runs already, else the recipe tells it. Raises
    UsageError for no URL."""
    root = shown(normalise_endpoint(endpoint))
    try:
        version = probe_endpoint(root).version
    except SurespecError:
        version = ""
    return ManagedEngine(engine, model, root, version or (recipe.engine_version if recipe else ""), recipe)


def _get(root: str, path: str) -> str | None:
    """The body at a path, None when it does not answer with one."""
    try:
        return get_text(normalise_endpoint(root), path, _TIMEOUT_S, _MAX_BYTES)
    except OSError:
        return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
