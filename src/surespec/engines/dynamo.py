"""NVIDIA Dynamo on one machine: its real frontend and router, and N workers of one kind, as one server.

All of it is one shell line: workers in the background, the frontend before them; when the frontend ends, all end.
Discovery is by files in a folder of the run's own (``DYN_FILE_KV``), requests go over TCP and events over ZMQ, so no
service is needed; ``--discovery etcd`` uses an etcd and a NATS that run already. The frontend counts no speculation:
acceptance is read from the workers' system ports and summed. Readiness is the frontend's ``/health`` listing every
worker, then a real streamed answer.

The vLLM worker and the embedded one are checked for real with Dynamo 1.6.1 on a CPU; those of SGLang and TensorRT-LLM
are not verified on hardware.
"""

from __future__ import annotations

import http.client
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import psutil

from surespec.core import Arm
from surespec.dialects import sglang as sglang_dialect
from surespec.dialects import trtllm as trtllm_dialect
from surespec.dialects.base import compact_json
from surespec.engines.arm_words import deployment_of
from surespec.engines.base import DEFAULT_PORT, Engine, EngineSettings, FetchHook, RunningServer, StageHook
from surespec.engines.failures import Remedy
from surespec.engines.local import make_local
from surespec.engines.pace import Pace
from surespec.engines.process import HOST, ServerProcess, free_port, port_is_free, start_server
from surespec.engines.python_env import PythonEnv, ask, find_env
from surespec.engines.sglang import SglangEngine, make_sglang
from surespec.engines.trtllm import TrtllmEngine, config_text, make_trtllm
from surespec.engines.vllm import DISTRIBUTIONS as VLLM_DISTRIBUTIONS
from surespec.engines.vllm import VllmEngine, make_vllm
from surespec.errors import ConfigError, EngineError
from surespec.fetch import fetch
from surespec.json_text import loads_json

DYNAMO = ("ai-dynamo",)
ROUTER_MODES = ("round-robin", "random", "kv", "power-of-two", "least-loaded")
DISCOVERY = ("file", "etcd")
START_TIMEOUT_S = 900.0
FRONTEND_START_S = 8.0
POLL_S = 0.4
CONFIG_BESIDE = "${DYN_FILE_KV:-surespec-dynamo}.yaml"
MIGRATION_LIMIT = 3
FIRST_SYSTEM_PORT = 8081
FIRST_EVENT_PORT = 20081
FIRST_SIDE_PORT = 5601


class WorkerKind(Protocol):
    """What goes inside Dynamo: an engine of surespec's, and how its worker is started."""

    @property
    def engine(self) -> Engine:
        """The engine that the worker wraps; arms, drafters and refusals are its own."""
        ...

    def argv(self, arm: Arm, *, typed: bool) -> list[str]:
        """The worker's arguments; ``typed``: as a person types them."""
        ...

    def environment(self) -> dict[str, str]:
        """Variables that every worker needs."""
        ...


@dataclass(frozen=True, slots=True)
class VllmWorker:
    """``python -m dynamo.vllm`` with the flags of vLLM's own server."""

    engine: VllmEngine

    def argv(self, arm: Arm, *, typed: bool) -> list[str]:
        """Dynamo takes vLLM's flags; address and port are not a worker's."""
        return [str(self.engine.env.python), "-m", "dynamo.vllm", *self.engine.model_flags(arm)]

    def environment(self) -> dict[str, str]:
        """Those of vLLM on this device."""
        return {"VLLM_NO_USAGE_STATS": "1", **self.engine.variables()}


@dataclass(frozen=True, slots=True)
class SglangWorker:
    """``python -m dynamo.sglang`` with SGLang's own flags. Not verified on hardware."""

    engine: SglangEngine

    def argv(self, arm: Arm, *, typed: bool) -> list[str]:
        """The flags that surespec writes for SGLang's server, without its address."""
        inner = self.engine
        d = deployment_of("sglang", arm, inner.target, inner.settings, host=HOST, port=DEFAULT_PORT)
        return [str(inner.env.python), "-m", "dynamo.sglang", "--model-path", inner.target, *sglang_dialect.flags(d)]

    def environment(self) -> dict[str, str]:
        """None of its own."""
        return {}


@dataclass(frozen=True, slots=True)
class TrtllmWorker:
    """``python -m dynamo.trtllm`` with a file for its speculation. Not verified on hardware."""

    engine: TrtllmEngine
    python: Path

    def argv(self, arm: Arm, *, typed: bool) -> list[str]:
        """A shell that writes the arm's file beside the run's folder, then becomes the worker."""
        inner = self.engine
        d = deployment_of("trtllm", arm, inner.target, inner.settings, host=HOST, port=DEFAULT_PORT)
        argv = [str(self.python), "-m", "dynamo.trtllm", "--model-path", inner.target, *trtllm_dialect.flags(d)]
        file = f'"{CONFIG_BESIDE}"'
        write = f"printf '%s' {shlex.quote(config_text(d))} > {file}"
        return ["sh", "-c", f"{write} && exec {shlex.join(argv)} --extra-engine-args {file}"]

    def environment(self) -> dict[str, str]:
        """None of its own."""
        return {}


@dataclass(frozen=True, slots=True)
class LocalWorker:
    """``surespec serve --dynamo``: the embedded engine."""

    engine: Engine
    model: str
    precision: str
    settings: EngineSettings
    python: Path

    def argv(self, arm: Arm, *, typed: bool) -> list[str]:
        """A surespec command; it finds Dynamo's environment by itself."""
        argv = ["surespec"] if typed else [sys.executable, "-m", "surespec"]
        argv += ["serve", "--dynamo", "--model", self.model, "--precision", self.precision]
        argv += ["--max-num-seqs", str(max(8, self.settings.max_num_seqs))]
        length = self.settings.max_model_len
        argv += ["--max-model-len", str(length)] if length else []
        if arm.speculative_config is not None:
            argv += ["--speculative-config", compact_json(arm.speculative_config)]
        return argv

    def environment(self) -> dict[str, str]:
        """Where Dynamo is, and this copy of surespec where it is not installed."""
        return {"SURESPEC_DYNAMO_PYTHON": str(self.python)}


@dataclass(frozen=True, slots=True)
class MockerWorker:
    """Dynamo's own simulator of a worker: no weights, a clock instead. ``accept_rates``: the conditional acceptance of
    each draft position (position i accepted, given that all before it were)."""

    engine: Engine
    folder: str
    model: str
    python: Path
    accept_rates: tuple[float, ...] = ()

    def argv(self, arm: Arm, *, typed: bool) -> list[str]:
        """``dynamo.mocker`` with simulated drafts where there are rates and the arm drafts."""
        argv = [str(self.python), "-m", "dynamo.mocker", "--model-path", self.folder, "--model-name", self.model]
        argv += ["--block-size", "16"]
        rates = self.accept_rates[: arm.num_speculative_tokens]
        if rates:
            argv += ["--ais-nextn", str(len(rates)), "--ais-nextn-accept-rates", ",".join(map(str, rates))]
            argv += ["--ais-mtp-seed", "1"]
        return argv

    def environment(self) -> dict[str, str]:
        """The tokenizer comes from the folder alone."""
        return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@dataclass(frozen=True)
class DynamoEngine:
    """A frontend and ``settings.workers`` workers of one kind. ``env`` has Dynamo."""

    name: str
    env: PythonEnv
    worker: WorkerKind
    settings: EngineSettings

    @property
    def k_by_batch_size(self) -> bool:
        """As the engine inside."""
        return self.worker.engine.k_by_batch_size

    def pace(self) -> Pace:
        """That of the engine inside, started once a worker, with the frontend's own start."""
        inner = self.worker.engine.pace()
        return replace(inner, start_s=inner.start_s * max(1, self.settings.workers) + FRONTEND_START_S)

    def drafter(self, name: str) -> str:
        """As the engine inside."""
        return self.worker.engine.drafter(name)

    def refusal(self, arm: Arm) -> str:
        """As the engine inside: the release that this Dynamo runs with decides which fields there are (rule V5)."""
        return self.worker.engine.refusal(arm)

    def prepare(self, arms: Sequence[Arm], progress: FetchHook) -> None:
        """Get model and drafters, as the engine inside."""
        self.worker.engine.prepare(arms, progress)

    def mended(self, arm: Arm, remedy: Remedy) -> DynamoEngine | None:
        """With the engine inside mended."""
        if remedy.name in ("again", "other_port"):
            return self
        inner = self.worker.engine.mended(arm, remedy)
        if isinstance(inner, VllmEngine):
            return replace(self, worker=VllmWorker(inner))
        if isinstance(inner, SglangEngine):
            return replace(self, worker=SglangWorker(inner))
        if isinstance(inner, TrtllmEngine):
            return replace(self, worker=TrtllmWorker(inner, self.env.python))
        return None

    def command(self, arm: Arm, port: int = DEFAULT_PORT) -> list[str]:
        """The whole graph as one line for a shell."""
        system = [FIRST_SYSTEM_PORT + i for i in range(self.settings.workers)]
        return ["sh", "-c", self._script(arm, port, system, "", typed=True)]

    def start(self, arm: Arm, log_path: Path, on_stage: StageHook | None = None) -> RunningServer:
        """Start frontend and workers; returns after ``/health`` lists all workers and a streamed answer came.

        Raises EngineError; nothing is left running then.
        """
        port = free_port()
        system = system_ports(self.settings.workers)
        folder = tempfile.mkdtemp(prefix="surespec-dynamo-")
        count = self.settings.workers
        server = start_server(
            ["sh", "-c", self._script(arm, port, system, folder, typed=False)],
            port=port,
            log_path=log_path,
            timeout_s=START_TIMEOUT_S,
            engine=self.worker.engine.name,
            env={"HF_HUB_OFFLINE": "1"} if isinstance(self.worker, LocalWorker) else {},
            cleanup=("rm", "-rf", folder, f"{folder}.yaml"),
            on_stage=on_stage,
            ready=_workers_listed(port, count, self._marker()),
        )
        server.metrics_endpoints = tuple(f"http://{HOST}:{one}" for one in system)
        return server

    def frontend_argv(self, port: int, *, migrate: bool) -> list[str]:
        """The frontend's arguments; ``migrate``: requests of a worker that dies go on at another."""
        argv = [str(self.env.python), "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port)]
        argv += ["--router-mode", self.settings.router_mode]
        return [*argv, *(["--migration-limit", str(MIGRATION_LIMIT)] if migrate else [])]

    def environment(self, folder: str) -> dict[str, str]:
        """What frontend and workers share; ``folder`` is where they find each other."""
        files = {"DYN_FILE_KV": folder} if self.settings.discovery == "file" else {}
        return {**_planes(self.settings.discovery), **files, **self.worker.environment()}

    def worker_environment(self, system_port: int, number: int) -> dict[str, str]:
        """One worker's own ports: vLLM's workers open two more each."""
        own = {"DYN_SYSTEM_PORT": str(system_port)}
        if isinstance(self.worker, VllmWorker):
            own |= {
                "DYN_VLLM_KV_EVENT_PORT": str(FIRST_EVENT_PORT + number),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(FIRST_SIDE_PORT + number),
            }
        return own

    def _marker(self) -> str:
        """What a worker's command line holds."""
        markers: dict[type, str] = {
            VllmWorker: "dynamo.vllm",
            SglangWorker: "dynamo.sglang",
            TrtllmWorker: "dynamo.trtllm",
            MockerWorker: "dynamo.mocker",
        }
        return markers.get(type(self.worker), "--dynamo")

    def _script(self, arm: Arm, port: int, system: Sequence[int], folder: str, *, typed: bool) -> str:
        """One line: what all need, the workers, the frontend. ``folder`` empty: the line makes one of its own."""
        kv = shlex.quote(folder) if folder else '"$(mktemp -d)"'
        shared = {**_planes(self.settings.discovery), **self.worker.environment()}
        needs_kv = self.settings.discovery == "file"
        parts = [f"export {_assignments(shared)}" + (f" DYN_FILE_KV={kv}" if needs_kv else "")]
        ending = 'rm -rf "$DYN_FILE_KV" "$DYN_FILE_KV.yaml"; kill 0' if needs_kv else "kill 0"
        parts.append(f"trap {shlex.quote(ending)} EXIT")
        for index, one in enumerate(system):
            own = {"DYN_SYSTEM_PORT": str(one)}
            if len(system) > 1:
                own = self.worker_environment(one, index)
            parts.append(f"{_assignments(own)} {shlex.join(self.worker.argv(arm, typed=typed))} &")
        frontend = self.frontend_argv(port, migrate=len(system) > 1)
        quiet = "" if typed else "DYN_LOG=warn "  # a line for each look at /health would bury a worker's last words
        parts.append(quiet + shlex.join(frontend))
        line = "; ".join(parts)
        return line.replace("&; ", "& ")


def _planes(discovery: str) -> dict[str, str]:
    """Dynamo's planes, on the loopback interface. NATS is used beside etcd only."""
    if discovery == "etcd":
        return {"DYN_DISCOVERY_BACKEND": "etcd", "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "nats"}
    return {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": HOST,
        "DYN_EVENT_PLANE_HOST": HOST,
        "DYN_TCP_RESPONSE_STREAM_HOST": HOST,
        "DYN_SYSTEM_HOST": HOST,
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    }


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def system_ports(count: int) -> list[int]:
    """Different free ports that Dynamo takes: it reads its system port as a signed 16-bit number."""
    free = (port for port in range(secrets.randbelow(8000) + 18000, 32768) if port_is_free(port))
    found = list(islice(free, count))
    if len(found) < count:
        raise EngineError("There is no free port below 32768 for Dynamo's system port.")
    return found


def _workers_listed(port: int, count: int, marker: str) -> Callable[[ServerProcess], bool]:
    """Whether the frontend's ``/health`` lists all workers. Raises EngineError when a worker has ended instead."""
    seen = 0

    def ready(server: ServerProcess) -> bool:
        nonlocal seen
        running = _running_workers(server.pid, marker)
        if running < min(seen, count):
            words = server.last_words()
            raise EngineError(
                f"A worker of Dynamo ended while starting{f': {words}' if words else ''}.",
                hint=f"Its log: {server.log_path}",
                failure=server.failure("start"),
            )
        seen = max(seen, running)
        time.sleep(POLL_S)
        return listed_workers(port) >= count

    return ready


def _running_workers(pid: int, marker: str) -> int:
    found = 0
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return 0
    for process in descendants:
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        # Not the shell, whose one argument holds every worker's line; and each worker once, not its children.
        found += marker in line
    return found


def listed_workers(port: int) -> int:
    """How many workers the frontend on this port lists; 0 while it does not answer or lists no model: a worker is an
    instance some time before its model is known."""
    rows, models = _get(port, "/health", "instances"), _get(port, "/v1/models", "data")
    if not models:
        return 0
    return len({row.get("instance_id") for row in rows if row.get("endpoint") == "generate"})


def _get(port: int, path: str, key: str) -> list[dict[str, Any]]:
    """The objects in a list of the frontend's answer; none where it does not answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", path)
        body: Any = loads_json(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return []
    finally:
        connection.close()
    rows = body.get(key) if isinstance(body, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _check(settings: EngineSettings) -> None:
    if settings.router_mode not in ROUTER_MODES:
        raise ConfigError(
            f"--router-mode {settings.router_mode}: there is no such mode.", hint=f"Choose {', '.join(ROUTER_MODES)}."
        )
    if settings.discovery not in DISCOVERY:
        raise ConfigError(f"--discovery {settings.discovery}: there is no such choice.", hint="Choose file or etcd.")


def make_dynamo(model: str, precision: str, settings: EngineSettings) -> DynamoEngine:
    """Dynamo with its vLLM worker. Raises ConfigError, ModelError, EngineError."""
    env = _with_inside("vLLM", VLLM_DISTRIBUTIONS, settings)
    inner = make_vllm(model, precision, replace(settings, python=env.python))
    return DynamoEngine("dynamo", env, VllmWorker(inner), settings)


def make_dynamo_sglang(model: str, precision: str, settings: EngineSettings) -> DynamoEngine:
    """Dynamo with its SGLang worker. Raises ConfigError, ModelError, EngineError."""
    env = _with_inside("sglang", ("sglang",), settings)
    inner = make_sglang(model, precision, replace(settings, python=env.python))
    return DynamoEngine("dynamo-sglang", env, SglangWorker(inner), settings)


def make_dynamo_trtllm(model: str, precision: str, settings: EngineSettings) -> DynamoEngine:
    """Dynamo with its TensorRT-LLM worker. Raises ConfigError, ModelError, EngineError."""
    env = _with_inside("TensorRT-LLM", ("tensorrt-llm", "tensorrt_llm"), settings)
    inner = make_trtllm(model, precision, replace(settings, python=env.python))
    return DynamoEngine("dynamo-trtllm", env, TrtllmWorker(inner, env.python), settings)


def _with_inside(engine: str, distributions: Sequence[str], settings: EngineSettings) -> PythonEnv:
    """Dynamo's environment, which has to hold the engine of the worker too."""
    _check(settings)
    env = find_env("dynamo", DYNAMO, settings.python)
    if ask(env.python, distributions) is None:
        raise EngineError(
            f"{env.python} has Dynamo but no {engine}.",
            hint="Run surespec in that worker's container, or name an interpreter that has both with --engine-python.",
        )
    return env


def make_dynamo_local(model: str, precision: str, settings: EngineSettings) -> DynamoEngine:
    """Dynamo with the embedded engine as its worker. Raises ConfigError, ModelError, EngineError."""
    _check(settings)
    env = find_env("dynamo", DYNAMO, settings.python)
    inner = make_local(model, precision, settings)
    return DynamoEngine("dynamo-local", env, LocalWorker(inner, model, precision, settings, env.python), settings)


def make_dynamo_mocker(model: str, accept_rates: Sequence[float], settings: EngineSettings) -> DynamoEngine:
    """Dynamo with its mocker, for the frontend's and the client's own limits; what it says of speed means nothing.

    Raises ConfigError, ModelError, EngineError.
    """
    _check(settings)
    env = find_env("dynamo", DYNAMO, settings.python)
    inner = make_local(model, "fp32", settings)
    worker = MockerWorker(inner, str(fetch(model, "hf")), model, env.python, tuple(accept_rates))
    return DynamoEngine("dynamo-mocker", env, worker, settings)
