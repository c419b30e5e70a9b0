"""``surespec serve --dynamo``: the embedded engine as a worker of NVIDIA Dynamo. Token ids in, token ids out.

The frontend applies the chat template, tokenizes, turns tokens into text and obeys stop strings; this worker decodes,
with speculation, and sends each step's tokens as they are accepted. The router is told which prompt blocks are in use
(``kv_blocks``), the system port (``DYN_SYSTEM_PORT``) serves vLLM's metric names, and every chunk carries the request's
acceptance as ``engine_data``: the frontend stops reading at an end token, so a last chunk alone could be lost.

Dynamo is found in its own environment (``make engine-dynamo``), where this same copy of surespec is run again.
Checked with Dynamo 1.6.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surespec.engines import dynamo_boot
from surespec.engines.python_env import find_env
from surespec.errors import ConfigError, EngineError, ModelError
from surespec.fetch import fetch, known_models
from surespec.local.engine import LocalEngine
from surespec.local.kv_blocks import BlockTable
from surespec.local.metrics import ServerMetrics
from surespec.local.server import ServeOptions, engine_of
from surespec.local.types import SamplingParams, StepOutput

DISTRIBUTIONS = ("ai-dynamo",)
BLOCK_SIZE = 16
MOST_LOGPROBS = 20
ENDPOINT = "backend.generate"


def serve_dynamo(options: ServeOptions) -> None:
    """Register the model with Dynamo and serve until SIGINT or SIGTERM; requests that run are finished first.

    Discovery and planes are Dynamo's variables (``DYN_DISCOVERY_BACKEND`` ...), by default files, TCP and ZMQ, which
    need no service. Without Dynamo in this environment the process becomes one of the environment that has it.
    Raises EngineError when there is none; ModelError, ConfigError for model and settings.
    """
    if importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo.runtime") is None:
        _become_dynamos(find_env("dynamo", DISTRIBUTIONS).python)
    folder = model_folder(options.model)
    engine, _ = engine_of(options, folder)
    name = options.served_model_name or options.model
    with contextlib.closing(engine):
        asyncio.run(_run(engine, folder, name))


def model_folder(model: str) -> Path:
    """The Hugging Face folder of a model: Dynamo's frontend reads tokenizer and chat template from it.

    Raises ModelError for anything else, a GGUF file included.
    """
    if model in known_models():
        return fetch(model, "hf")
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"--model {model}: Dynamo's frontend needs a model folder with config.json and tokenizer.json.",
            hint="Name such a folder, or smollm2-135m.",
        )
    return folder.absolute()


def _become_dynamos(python: Path) -> None:
    """Replace this process by the same command in Dynamo's environment."""
    boot = str(Path(dynamo_boot.__file__).resolve())
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(str(python), [str(python), boot, *sys.argv[1:]])
    except OSError as error:
        raise EngineError(f"{python} cannot be started: {error.strerror or error}.") from error


async def _run(engine: LocalEngine, folder: Path, name: str) -> None:
    llm, runtime = importlib.import_module("dynamo.llm"), importlib.import_module("dynamo.runtime")
    loop = asyncio.get_running_loop()
    for variable, value in {"DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_SYSTEM_HOST": "127.0.0.1"}.items():
        os.environ.setdefault(variable, value)
    drt = runtime.DistributedRuntime(
        loop,
        os.environ.get("DYN_DISCOVERY_BACKEND", "file"),
        os.environ.get("DYN_REQUEST_PLANE", "tcp"),
        event_plane=os.environ.get("DYN_EVENT_PLANE", "zmq"),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drt.shutdown)
    endpoint = drt.endpoint(f"{os.environ.get('DYN_NAMESPACE', 'dynamo')}.{ENDPOINT}")
    publisher = llm.KvEventPublisher(endpoint, kv_block_size=BLOCK_SIZE, enable_local_indexer=True)
    metrics = ServerMetrics(name, engine.counters, speculating=engine.speculative is not None)
    endpoint.metrics.register_prometheus_expfmt_callback(lambda: metrics.text().decode())
    handler = Handler(engine, publisher, metrics, invalid=llm.exceptions.InvalidArgument)
    await llm.register_model(
        llm.ModelInput.Tokens,
        llm.ModelType.Chat | llm.ModelType.Completions,
        endpoint,
        str(folder),
        name,
        worker_type=llm.WorkerType.Aggregated,
        kv_cache_block_size=BLOCK_SIZE,
        runtime_config=_runtime_config(llm, engine),
    )
    speculation = f"{engine.speculative.method}, k = {engine.num_speculative_tokens}" if engine.speculative else "off"
    print(f"surespec: serving {name} as a Dynamo worker (speculation: {speculation})", file=sys.stderr, flush=True)
    await endpoint.serve_endpoint(handler.generate, graceful_shutdown=True, metrics_labels=[("model", name)])
    print("surespec: stopped", file=sys.stderr, flush=True)


def _runtime_config(llm: Any, engine: LocalEngine) -> Any:
    """What the frontend and the router are told of this worker."""
    config = llm.ModelRuntimeConfig()
    config.context_length = engine.max_model_len
    config.total_kv_blocks = engine.kv_cache_tokens // BLOCK_SIZE
    config.max_num_seqs = engine.max_num_seqs
    config.max_num_batched_tokens = engine.max_model_len
    config.enable_local_indexer = True
    return config


class Handler:
    """Answers Dynamo's requests with a `LocalEngine`. ``publisher`` takes KV events; ``invalid`` is the exception that
    tells the frontend that the client is at fault."""

    def __init__(
        self, engine: LocalEngine, publisher: Any, metrics: ServerMetrics, *, invalid: type[Exception]
    ) -> None:
        self._engine, self._publisher, self._metrics, self._invalid = engine, publisher, metrics, invalid
        self._table = BlockTable(BLOCK_SIZE)

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """The chunks of one request. A client that goes away, or a stop by the frontend, frees its slot at once."""
        tokens = [int(token) for token in request.get("token_ids") or ()]
        params = sampling_params(request, self._engine.max_model_len - len(tokens))
        loop = asyncio.get_running_loop()
        begun = last = loop.time()
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        first: float | None = None
        reason, count = "abort", 0
        held = False
        steps = self._engine.generate(tokens, params)
        try:
            while True:
                step = asyncio.ensure_future(anext(steps))
                await asyncio.wait((step, stopped), return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    step.cancel()
                    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                        await step
                    return
                output = step.result()
                now = loop.time()
                if not held:
                    self._take(tokens)
                    held, first = True, now - begun
                if output.token_ids:
                    self._metrics.step(now - begun, None if count == 0 else now - last)
                count, last = count + len(output.token_ids), now
                reason = output.finish_reason or reason
                yield chunk(output, len(tokens), count, engine_data(self._engine, output, count))
                if output.finish_reason is not None:
                    return
        except ConfigError as error:
            raise self._invalid(str(error)) from error
        finally:
            stopped.cancel()
            await steps.aclose()  # type: ignore[attr-defined]
            if held:
                self._release(tokens)
            self._metrics.finished(reason, count, first or 0.0, loop.time() - begun)

    def _take(self, tokens: Sequence[int]) -> None:
        stored = self._table.take(tokens)
        if stored is not None:
            self._publisher.publish_stored(
                token_ids=list(stored.token_ids),
                num_block_tokens=[BLOCK_SIZE] * len(stored.hashes),
                block_hashes=list(stored.hashes),
                parent_hash=stored.parent,
            )

    def _release(self, tokens: Sequence[int]) -> None:
        gone = self._table.release(tokens)
        if gone:
            self._publisher.publish_removed(list(gone))


def sampling_params(request: Mapping[str, Any], room: int) -> SamplingParams:
    """Dynamo's request as the engine's parameters; ``room`` (tokens) is what is left for an answer without a limit."""
    stop = request.get("stop_conditions") or {}
    sampling = request.get("sampling_options") or {}
    output = request.get("output_options") or {}
    limit = stop.get("max_tokens")
    hidden = (*(stop.get("stop_token_ids_hidden") or ()), *(stop.get("stop_token_ids") or ()))
    logprobs = output.get("logprobs")
    temperature, top_k, top_p = sampling.get("temperature"), sampling.get("top_k"), sampling.get("top_p")
    return SamplingParams(
        max_tokens=max(1, room) if limit is None else int(limit),
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=int(top_k) if top_k is not None and top_k > 0 else 0,
        seed=sampling.get("seed"),
        stop_token_ids=tuple(int(token) for token in hidden),
        ignore_eos=bool(stop.get("ignore_eos")),
        logprobs=None if logprobs is None else min(MOST_LOGPROBS, int(logprobs)),
    )


def chunk(output: StepOutput, prompt_tokens: int, count: int, data: dict[str, Any]) -> dict[str, Any]:
    """One step as Dynamo's response; ``count`` tokens were sent with it and before."""
    made: dict[str, Any] = {"token_ids": list(output.token_ids), "index": 0, "engine_data": data}
    if output.logprobs is not None:
        made["log_probs"] = [entry.logprob for entry in output.logprobs]
        made["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "logprob": logprob}
                for rank, (token, logprob) in enumerate(entry.top, 1)
            ]
            for entry in output.logprobs
        ]
    if output.finish_reason is not None:
        made["finish_reason"] = "cancelled" if output.finish_reason == "abort" else output.finish_reason
        made["completion_usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "total_tokens": prompt_tokens + count,
        }
    return made


def engine_data(engine: LocalEngine, output: StepOutput, count: int) -> dict[str, Any]:
    """What reaches a client that asks for ``nvext.extra_fields: ["engine_data"]``; totals with the last chunk."""
    data: dict[str, Any] = {"num_speculative_tokens": engine.num_speculative_tokens, "output_tokens": count}
    if output.stats is not None:
        stats = output.stats
        data["spec_decode"] = {"drafts": stats.drafts, "drafted": stats.drafted, "accepted": stats.accepted}
    return data
