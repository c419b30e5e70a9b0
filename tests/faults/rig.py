"""One `surespec tune` under test: run to a moment, harmed there, looked at afterwards, resumed."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import toy

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
WAIT_S = 60.0
VERDICT = ("keep", "ngram-k5")
KNOWN = re.compile(
    r"(manifest|arms|judgement)\.json|events\.jsonl|report\.(html|csv)|\.lock"
    r"|launches/\d{3}-[\w.-]+/(launch\.json|traces-c\d+\.jsonl|server\.log)"
)
_CAPBSET_DROP, _DAC_OVERRIDE = 24, 1


@dataclass(frozen=True)
class Moment:
    """Where a run is stopped: at an event inside surespec, or at a point in a life of its server."""

    name: str
    event: str = ""
    pattern: str = ""
    number: int = 1
    where: str = ""
    life: int = 1

    @property
    def in_server(self) -> bool:
        return bool(self.where)


MOMENTS = {
    moment.name: moment
    for moment in (
        Moment("loading", "import", "typer"),
        Moment("planning", "open", "*/prompts.jsonl"),
        Moment("creating", "rename", "*/manifest.json"),
        Moment("starting", where="start"),
        Moment("warming-up", where="request", number=3),
        Moment("measuring", where="request", number=6),
        Moment("stopping", where="stop"),
        Moment("recording", "rename", "*/001-*/launch.json"),
        Moment("between", "open", "*/.arms.json.*", 3),
        Moment("judging", "rename", "*/judgement.json"),
        Moment("reporting", "rename", "*/report.html"),
    )
}


@dataclass
class Ended:
    """How a run of the command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def verdict(self) -> tuple[str, str | None]:
        document = json.loads(self.stdout)
        return document["verdict"], document["arm"]


@dataclass
class Rig:
    """A folder with a toy model, prompts, and the bundle of one run."""

    folder: Path
    out: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    sessions: int = 0
    faults: Path = Path()

    def start(
        self, moment: Moment | None = None, *extra: str, resume: bool = False, **server: object
    ) -> subprocess.Popen[str]:
        """Begin `surespec tune`, in a group of its own as from a terminal; permissions bind it even when root runs it."""
        self.sessions += 1
        self.faults = self.folder / f"faults-{self.mark[:6]}-{self.sessions}"
        self.faults.mkdir()
        if moment is not None and moment.in_server:
            plan = {"where": moment.where, "life": moment.life, "action": "meet"}
            server = {**plan, "numbers": [moment.number if moment.where == "request" else 0] * 2} | server
        elif moment is not None:
            hook = {"event": moment.event, "pattern": moment.pattern, "number": moment.number}
            (self.faults / "hook.json").write_text(json.dumps(hook))
        if server:
            (self.faults / "server.json").write_text(json.dumps(server))
        words = ["--out", str(self.out), "--json", *extra]
        if resume:
            words.append("--resume")
        else:
            words += ["--model", str(self.folder / "model"), "--prompts", str(self.folder / "prompts.jsonl")]
            words += ["--concurrency", "1,2", "--policy", "latency", "--output-len", "10"]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(HERE / "hooks"), str(SOURCE))),
            "SURESPEC_FAULTS": str(self.faults),
            "SURESPEC_FAULT_MARK": self.mark,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "surespec", "tune", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=env, start_new_session=True, preexec_fn=_bind_root,
        )  # fmt: skip

    def reached(self, process: subprocess.Popen[str]) -> None:
        """Wait for the moment."""
        wait_for(lambda: (self.faults / "reached").exists() or process.poll() is not None, "the moment")
        assert process.poll() is None, process.communicate()

    def go(self) -> None:
        """Let the run go on."""
        (self.faults / "go").touch()

    def end(self, process: subprocess.Popen[str], *, killed: bool = False, tidy: bool = True) -> Ended:
        """Wait for the command and for everything it started; no traceback may have been shown. ``tidy`` False: it
        could not remove what it was writing."""
        stdout, stderr = process.communicate(timeout=WAIT_S)
        ended = Ended(process.returncode, stdout, stderr)
        for word in ("Traceback", "Exception ignored", "surespec itself failed"):
            assert word not in stderr, stderr
        wait_for(lambda: not self.alive(), "the end of every process of the run", lambda: str(self.alive()))
        if not killed:
            assert ended.code in (0, 1, 2, 10, 11, 12), ended
        if tidy and not killed:
            self.no_strange_file()
        return ended

    def run(self, *extra: str, resume: bool = False) -> Ended:
        """An undisturbed run of the command."""
        return self.end(self.start(None, *extra, resume=resume))

    def resume(self, kept: dict[str, bytes] | None = None) -> Ended:
        """Go on, and check what must hold whatever had happened: verdict, report, and every launch measured before."""
        ended = self.run(resume=True)
        assert as_undisturbed(ended), ended
        assert (self.out / "report.html").stat().st_size > 10_000
        for name, content in (kept or {}).items():
            assert (self.out / name).read_bytes() == content, f"{name} was lost or changed"
        return ended

    def completed(self) -> dict[str, bytes]:
        """The files of the launches that are on disk as completed."""
        found = {}
        for record in self.out.glob("launches/*/launch.json"):
            if json.loads(record.read_text())["status"] == "ok":
                for file in (record, *record.parent.glob("traces-*.jsonl")):
                    found[str(file.relative_to(self.out))] = file.read_bytes()
        return found

    def server_pid(self) -> int:
        """The latest server's process."""
        lives = sorted(self.faults.glob("life-*"), key=lambda path: int(path.name.removeprefix("life-")))
        return int(json.loads(lives[-1].read_text())["pid"])

    def worker_pid(self) -> int:
        """The latest server's child."""
        lives = sorted(self.faults.glob("worker-*"), key=lambda path: int(path.name.removeprefix("worker-")))
        return int(lives[-1].read_text())

    def alive(self) -> list[str]:
        """The living processes of the run, wherever they hang: they carry its mark in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SURESPEC_FAULT_MARK") == self.mark and process.status() != "zombie":
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
            except psutil.Error:
                continue
        return found

    def no_strange_file(self) -> None:
        """Nothing is in the bundle but what a bundle has."""
        if self.out.exists():
            names = [str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file()]
            assert [name for name in names if not KNOWN.fullmatch(name)] == []


def as_undisturbed(ended: Ended) -> bool:
    """Whether a run came to the verdict of an undisturbed one. Its server is ten times as fast with drafts, but a
    machine that stutters may blur even that: then the same arm must be far ahead, and only the interval too wide."""
    if (ended.code, ended.verdict) == (0, VERDICT):
        return True
    if ended.code != 11 or ended.verdict != ("inconclusive", VERDICT[1]):
        return False
    return bool(json.loads(ended.stdout)["ratios"]["c1"]["throughput_tok_s"]["estimate"] > 1.5)


def make_rig(folder: Path, out: Path | None = None) -> Rig:
    """A rig in a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    toy.make_llama(folder / "model", max_position_embeddings=2048)
    lines = [json.dumps({"id": f"p{i}", "prompt": f"Tell me about number {i}."}) for i in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return Rig(folder, out or folder / "run")


def copied(rig: Rig, folder: Path) -> Rig:
    """A copy of a finished rig's bundle, to be harmed; model and prompts stay where they are."""
    shutil.copytree(rig.out, folder / "run")
    return Rig(rig.folder, folder / "run")


def wait_for(condition: Callable[[], bool], what: str, say: Callable[[], str] = str) -> None:
    """Wait, generously; no test is decided by how long it takes."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what} {say()}"
        time.sleep(0.02)


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C: the terminal sends it to the group in the foreground, in which the server is not."""
    os.killpg(process.pid, signal.SIGINT)


def _bind_root() -> None:
    """Root without the right to ignore permissions, so that a read-only folder is one."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(_CAPBSET_DROP, _DAC_OVERRIDE, 0, 0, 0)
