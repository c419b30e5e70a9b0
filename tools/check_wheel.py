"""Build the wheel and the sdist, install the wheel into an empty environment, and do the main job with it.

    python tools/check_wheel.py [--python 3.11 3.12 3.13] [--quick]

For every version asked for: a new environment without anything of this checkout, the wheel with its dependencies from
the user's own package index, then ``--version``, ``doctor``, a plan, and (without ``--quick``) a short real ``tune`` of
the small model. A version that is not on this machine is named and left out. The sdist is
unpacked and a wheel built from it, which must hold the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
PLAN = ("plan", "--offline", "--json", "--device", "thor-t5000", "--model", "meta-llama/Llama-3.1-8B-Instruct")
TUNE = ("tune", "--prompts", "copy", "--num-prompts", "4", "--output-len", "16", "--concurrency", "1", "--json")
RESULTS = (0, 10, 11)  # keep, disable, marginal or inconclusive: a short run may say any


def main() -> int:
    """Exit code 0 when every environment passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="*", default=VERSIONS, help="versions, or paths of interpreters")
    parser.add_argument("--quick", action="store_true", help="no tune, so no model is needed")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="surespec-wheel-") as name:
        folder = Path(name)
        wheel = build(folder)
        print(f"built {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, the same from the sdist", flush=True)
        done = 0
        for version in chosen.python:
            interpreter = find(version)
            if interpreter is None:
                print(f"Python {version} is not on this machine: left out", flush=True)
                continue
            try_out(interpreter, wheel, folder, quick=chosen.quick)
            done += 1
    if not done:
        print("No Python was tried.", file=sys.stderr)
    return 0 if done else 1


def build(folder: Path) -> Path:
    """The wheel of the checkout; raises SystemExit when the sdist gives another one."""
    tools = folder / "build-env"
    call(sys.executable, "-m", "venv", tools)
    call(tools / "bin" / "python", "-m", "pip", "install", "--quiet", "build")
    call(tools / "bin" / "python", "-m", "build", "--outdir", folder / "dist", ROOT)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    call(tools / "bin" / "python", "-m", "build", "--wheel", "--outdir", folder / "again", source)
    (second,) = (folder / "again").glob("*.whl")
    if contents(wheel) != contents(second):
        sys.exit(f"the sdist gives another wheel: {contents(wheel) ^ contents(second)}")
    return wheel


def contents(wheel: Path) -> set[tuple[str, int]]:
    """Names and checksums of a wheel's files, but for the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {(entry.filename, entry.CRC) for entry in archive.infolist() if not entry.filename.endswith("RECORD")}


def find(version: str) -> str | None:
    """An interpreter of that version that runs: on PATH, or among those of pyenv."""
    if Path(version).is_file():
        return version
    pyenv = sorted((Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions").glob(f"{version}.*"))
    places = [shutil.which(f"python{version}"), *(str(p / "bin" / "python") for p in reversed(pyenv)), sys.executable]
    for place in places:
        if place and said(place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])") == version:
            return place
    return None


def said(*command: str) -> str:
    """What a command prints, empty when it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def try_out(interpreter: str, wheel: Path, folder: Path, *, quick: bool) -> None:
    """Install and run; raises SystemExit with what went wrong."""
    version = said(interpreter, "-c", "import platform; print(platform.python_version())")
    env = folder / f"env-{version}"
    call(interpreter, "-m", "venv", env)
    call(env / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", wheel)
    surespec = env / "bin" / "surespec"
    work = folder / f"work-{version}"
    work.mkdir()
    print(f"Python {version}: {run(surespec, '--version', cwd=work)[1].strip()}", flush=True)
    code, text = run(surespec, "doctor", "--json", cwd=work)
    if code != 0 or not json.loads(text)["ok"]:
        sys.exit(f"Python {version}: doctor ended with {code}: {text}")
    code, text = run(surespec, *PLAN, cwd=work)
    if code != 0 or not json.loads(text)["arms"]:
        sys.exit(f"Python {version}: plan ended with {code}: {text}")
    if not quick:
        code, text = run(surespec, *TUNE, "--out", str(work / "run"), cwd=work)
        if code not in RESULTS:
            sys.exit(f"Python {version}: tune ended with {code}: {text}")
        verdict = json.loads(text)["verdict"]
        print(
            f"Python {version}: doctor, plan and tune ({verdict}, report {(work / 'run/report.html').is_file()})",
            flush=True,
        )
    else:
        print(f"Python {version}: doctor and plan", flush=True)
    shutil.rmtree(env)


def run(program: Path, *arguments: str, cwd: Path) -> tuple[int, str]:
    """Exit code and stdout, away from the checkout and with nothing of this environment."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    clean["PATH"] = f"{program.parent}:{clean['PATH']}"
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, text=True, cwd=cwd, env=clean, check=False)
    return done.returncode, done.stdout


def call(*command: object) -> None:
    """Run it; its output is shown only when it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(
            f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


if __name__ == "__main__":
    sys.exit(main())
