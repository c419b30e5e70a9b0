"""A run on disk: what was planned, measured and decided. Append-only, readable half-way, resumable.

    DIR/manifest.json                 schema, when, which surespec, options, machine
    DIR/events.jsonl                  time line, one event a line
    DIR/arms.json                     the arms under test, each with a note
    DIR/launches/NNN-ARM/launch.json  one server life (core.Launch without traces), written when it is over
    DIR/launches/NNN-ARM/traces-cC.jsonl   its requests at concurrency C, a core.Trace a line, appended as measured
    DIR/launches/NNN-ARM/server.log   what the server said
    DIR/judgement.json                the verdict (surespec/tune/1)
    DIR/.lock                         held while a process works on it

Every whole file appears by one rename, so a reader never sees half of one; it and its folder are flushed to the disk. A
launch without a readable ``launch.json`` and all its traces was cut off; it is left alone, named in
``Bundle.problems``, and measured again. The time line begins with a copy of the manifest, from which a damaged one is
restored.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from surespec._version import __version__
from surespec.core import Arm, Judgement, Launch, Run, Trace
from surespec.errors import BundleError
from surespec.json_text import loads_json

SCHEMA_NAME, SCHEMA_VERSION = "surespec/bundle", 1
_LAUNCH_DIR = re.compile(r"(\d{3,})-(.+)")
_PARTS = (
    "manifest.json", "events.jsonl", "arms.json", "judgement.json", "report.html", "report.csv", ".lock", "launches",
    "recipe", "original", "journal.json",
)  # fmt: skip
_SCRATCH = re.compile(r"\.(?:\w[\w.-]*\.(?:jsonl?|html|csv))\.[a-z0-9_]{8}|server\.log\.part")
"""Names of files half written by a process that was killed."""


class Bundle:
    """One run's folder. ``problems`` names what could not be read, one sentence each, and is filled by reading."""

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path = path
        self.manifest = dict(manifest)
        self.problems: list[str] = []

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any]) -> Bundle:
        """Make a new bundle in an empty or new folder. ``manifest`` gives ``options``, ``machine`` and the like.

        Raises BundleError when the folder holds something already or cannot be written.
        """
        if (path / "manifest.json").exists():
            raise BundleError(
                f"{path} holds a run already.", hint=f"Go on with it: --resume --out {path}; or choose another --out."
            )
        refuse_links(path)
        try:
            if path.exists() and any(not _is_leftover(entry) for entry in path.iterdir()):
                raise BundleError(f"{path} is not empty and holds no run.", hint="Choose a new folder with --out.")
            (path / "launches").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(path, error) from error
        document = {
            "schema": f"{SCHEMA_NAME}/{SCHEMA_VERSION}",
            "created_at": utc_now(),
            "surespec_version": __version__,
            **manifest,
        }
        bundle = cls(path, document)
        with bundle.lock():
            if (path / "manifest.json").exists():
                raise BundleError(f"Another surespec has just begun a run in {path}.", hint="Choose another --out.")
            (path / "events.jsonl").unlink(missing_ok=True)
            bundle.event("created", manifest=document)
            write_json(path / "manifest.json", document)
        return bundle

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Open an existing bundle. Raises BundleError when it is missing, unreadable, or of another schema version."""
        refuse_links(path)
        file = path / "manifest.json"
        problems = []
        try:
            manifest = loads_json(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BundleError(
                f"{path} holds no run (there is no manifest.json).", hint="Name the --out folder of a surespec tune."
            ) from error
        except (OSError, ValueError) as error:
            manifest = next((e.get("manifest") for e in cls(path, {}).events() if e.get("kind") == "created"), None)
            if manifest is None:
                raise BundleError(
                    f"{file} cannot be read: {error}.", hint="Start a new run in another folder."
                ) from error
            problems = [f"{file.name} cannot be read; what it said was taken from events.jsonl."]
        schema = str(manifest.get("schema", "")) if isinstance(manifest, dict) else ""
        name, _, version = schema.rpartition("/")
        if name != SCHEMA_NAME or not version.isdigit():
            raise BundleError(f"{file} is not the manifest of a run (schema {schema!r}).", hint="Name another folder.")
        if int(version) > SCHEMA_VERSION:
            raise BundleError(
                f"{path} was written by a newer surespec ({manifest.get('surespec_version', '?')}, schema {schema}); "
                f"this one ({__version__}) reads up to {SCHEMA_NAME}/{SCHEMA_VERSION}.",
                hint="Update surespec to read it.",
            )
        bundle = cls(path, manifest)
        bundle.problems += problems
        return bundle

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the bundle for this process. Raises BundleError when another one holds it.

        The lock is the kernel's (flock), so it is gone when its holder is, however that ended.
        """
        try:
            file = (self.path / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise _unwritable(self.path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                raise BundleError(
                    f"Another surespec (process {holder}) is working on {self.path}.",
                    hint="Wait for it, stop it, or choose another --out.",
                ) from error
            with contextlib.suppress(OSError):  # the number is only for the message above
                file.truncate(0)
                os.write(file.fileno(), str(os.getpid()).encode())
            self._sweep()
            yield

    def _sweep(self) -> None:
        """Remove what a killed process left half written. Only for the holder of the lock."""
        for folder in (self.path, *(folder for _, folder in self._launch_dirs())):
            for entry in folder.iterdir():
                if _SCRATCH.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        entry.unlink()

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event to the time line."""
        append_line(self.path / "events.jsonl", {"t_utc": utc_now(), "kind": kind, **fields})

    def events(self) -> tuple[dict[str, Any], ...]:
        """The time line; a line cut off by a crash is left out."""
        found = []
        for line in _lines(self.path / "events.jsonl"):
            with contextlib.suppress(ValueError):
                found.append(loads_json(line))
        return tuple(event for event in found if isinstance(event, dict))

    def write_arms(self, arms: Sequence[Arm], notes: Mapping[str, str] | None = None) -> None:
        """The arms under test, with what is known or predicted about each in ``notes`` (by name)."""
        entries = [{**arm.model_dump(mode="json"), "note": (notes or {}).get(arm.name, "")} for arm in arms]
        write_json(self.path / "arms.json", entries)

    def arms(self) -> tuple[Arm, ...]:
        """The arms, in the order they were planned."""
        try:
            return tuple(Arm.model_validate({k: v for k, v in e.items() if k != "note"}) for e in self._arm_entries())
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            hint = "Go on with --resume, which writes it anew."
            raise BundleError(f"{self.path / 'arms.json'}: {where} is not valid.", hint=hint) from error

    def arm_notes(self) -> dict[str, str]:
        """Remarks on arms, by name; those without one are left out."""
        return {str(e.get("name")): str(e["note"]) for e in self._arm_entries() if e.get("note")}

    def launch_dir(self, index: int, arm: str) -> Path:
        """The folder of a launch, made if needed. Raises BundleError when it cannot be."""
        folder = self.path / "launches" / f"{index:03d}-{_safe(arm)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        return folder

    def next_index(self) -> int:
        """The number after the last launch that was begun, finished or not."""
        return max((index for index, _ in self._launch_dirs()), default=-1) + 1

    def append_trace(self, index: int, arm: str, concurrency: int, trace: Trace) -> None:
        """Keep one request as soon as it is measured."""
        append_line(self.launch_dir(index, arm) / f"traces-c{concurrency}.jsonl", trace.model_dump(mode="json"))

    def write_launch(self, launch: Launch) -> None:
        """Write a finished launch. Traces already appended stay; those of other runs are written now."""
        folder = self.launch_dir(launch.index, launch.arm)
        for run in launch.runs:
            file = folder / f"traces-c{run.concurrency}.jsonl"
            if run.traces and len(_lines(file)) != len(run.traces):
                text = "".join(json.dumps(t.model_dump(mode="json"), ensure_ascii=False) + "\n" for t in run.traces)
                write_text(file, text)
            elif run.traces:
                _flush(file)
        document = launch.model_dump(mode="json")
        for body, run in zip(document["runs"], launch.runs, strict=True):
            del body["traces"]
            body["num_traces"] = len(run.traces)
        write_json(folder / "launch.json", document)

    def launches(self, with_traces: bool = False) -> tuple[Launch, ...]:
        """Every launch that was written whole, in order; the rest is named in ``problems``."""
        found = []
        for _, folder in self._launch_dirs():
            try:
                found.append(_read_launch(folder, with_traces))
            except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
                reason = "was cut off" if isinstance(error, FileNotFoundError) else f"cannot be read ({_short(error)})"
                said = f"Launch {folder.name} {reason}; it is not counted."
                if said not in self.problems:
                    self.problems.append(said)
        return tuple(found)

    def write_judgement(self, judgement: Judgement) -> None:
        """Write the verdict, replacing an earlier one."""
        write_json(self.path / "judgement.json", judgement.document("tune"))

    def judgement(self) -> Judgement | None:
        """The verdict, or None while there is none. Raises BundleError when the file is damaged."""
        file = self.path / "judgement.json"
        if not file.exists():
            return None
        try:
            body = loads_json(file.read_text(encoding="utf-8"))
            body.pop("schema")
            return Judgement.model_validate(body)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BundleError(
                f"{file} is damaged: {_short(error)}.", hint=f"Judge again: surespec tune --resume --out {self.path}"
            ) from error

    def _arm_entries(self) -> list[dict[str, Any]]:
        file = self.path / "arms.json"
        if not file.exists():
            return []
        try:
            entries = loads_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BundleError(f"{file} is damaged: {_short(error)}.", hint="Delete it and --resume.") from error
        return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []

    def _launch_dirs(self) -> list[tuple[int, Path]]:
        root = self.path / "launches"
        if not root.is_dir():
            return []
        matches = ((_LAUNCH_DIR.fullmatch(folder.name), folder) for folder in root.iterdir() if folder.is_dir())
        return sorted((int(match[1]), folder) for match, folder in matches if match)


def refuse_links(path: Path) -> None:
    """Raise BundleError when a part of the run's folder is a link: through it, what is read and written would lie
    somewhere else, and the folder may come from a stranger. The folder itself may be reached by one."""
    waiting = [path / name for name in _PARTS]
    while waiting:
        entry = waiting.pop()
        if entry.is_symlink():
            raise BundleError(f"{entry} is a link, which no run writes.", hint="Put the file itself in its place.")
        with contextlib.suppress(OSError):
            waiting += entry.iterdir() if entry.is_dir() else ()


def write_text(path: Path, text: str) -> None:
    """Write a file whole: beside it first, then one rename. Raises BundleError when the folder cannot be written."""
    scratch = None
    try:
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
        scratch = None
        _flush(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:  # also after Ctrl-C
        if scratch is not None:
            with contextlib.suppress(OSError):
                Path(scratch).unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Have the disk hold a file, or a folder's names. Some file systems cannot, which is no reason to fail."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _is_leftover(entry: Path) -> bool:
    """Whether a run that was ended before it had begun has left this: it holds nothing."""
    if entry.name in (".lock", "events.jsonl") or _SCRATCH.fullmatch(entry.name):
        return True
    return entry.name == "launches" and not any(entry.iterdir())


def write_json(path: Path, document: object) -> None:
    """``write_text`` of an indented JSON document."""
    write_text(path, json.dumps(document, ensure_ascii=False, indent=1) + "\n")


def append_line(path: Path, document: Mapping[str, Any]) -> None:
    """Append one JSON line, whole or not at all. Raises BundleError when the file cannot be written.

    A last line that a power cut left without its end is ended first, so that it spoils no other.
    """
    line = (json.dumps(document, ensure_ascii=False) + "\n").encode()
    try:
        with path.open("a+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size and (file.seek(size - 1), file.read(1))[1] != b"\n":
                line = b"\n" + line
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except BaseException:
                file.truncate(size)
                raise
    except OSError as error:
        raise _unwritable(path, error) from error


def utc_now() -> str:
    """Now, as an ISO string in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _read_launch(folder: Path, with_traces: bool) -> Launch:
    """One launch; ValueError when its traces are not all there."""
    body = loads_json((folder / "launch.json").read_text(encoding="utf-8"))
    for run in body["runs"]:
        file = folder / f"traces-c{int(run['concurrency'])}.jsonl"
        expected = int(run.pop("num_traces"))
        lines = _lines(file)
        if len(lines) != expected:
            raise ValueError(f"{file.name} has {len(lines)} of {expected} requests")
        if with_traces:
            run["traces"] = [loads_json(line) for line in lines]
    launch = Launch.model_validate(body)
    if with_traces:
        _check_sums(launch)
    return launch


def _check_sums(launch: Launch) -> None:
    """A run's own token count must be that of its traces, else the file was edited or damaged."""
    for run in launch.runs:
        if run.traces and _tokens(run) != run.output_tokens:
            raise ValueError(f"the traces at concurrency {run.concurrency} have {_tokens(run)} tokens, the run "
                             f"{run.output_tokens}")  # fmt: skip


def _tokens(run: Run) -> int:
    return sum(trace.output_tokens for trace in run.traces if trace.ok)


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; none when there is no file. A last line without its end was cut off."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return text.split("\n")[:-1]


def _safe(name: str) -> str:
    """An arm's name as part of a folder name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _short(error: Exception) -> str:
    """The first line of an error; validation errors name the first field."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"field {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error).split("\n", 1)[0] or type(error).__name__


def _unwritable(path: Path, error: OSError) -> BundleError:
    return BundleError(
        f"{path} cannot be written: {error.strerror or error}.", hint="Choose a folder of yours with --out."
    )
