"""TensorRT-LLM: the arm as the YAML of ``trtllm-serve --config`` (llm_args.py@00043967)."""

from __future__ import annotations

import shlex
from typing import Any

from surespec.dialects.base import Command, Deployment, shell_line, to_yaml

CONFIG_FILE = "surespec-trtllm.yaml"
_NOTES = ("Older releases call --config --extra_llm_api_options.",)
DECODING_TYPES = {"eagle3": "Eagle3", "mtp": "MTP", "ngram": "NGram", "draft_model": "Draft_Target", "dflash": "DFlash"}


def speculative_section(d: Deployment) -> dict[str, Any] | None:
    """The ``speculative_config`` section, or None for the baseline."""
    if not d.config:
        return None
    section: dict[str, Any] = {"decoding_type": DECODING_TYPES[d.method], "max_draft_len": d.k}
    if d.drafter is not None and d.drafter.id:
        section["speculative_model"] = d.drafter.id
    if d.method == "ngram":
        section["max_matching_ngram_size"] = int(d.config.get("prompt_lookup_max", 2))
    table = d.config.get("num_speculative_tokens_per_batch_size")
    if table:
        # Keys are the upper ends; above the last one TensorRT-LLM drafts nothing, so a closing zero is left out.
        section["draft_len_schedule"] = {int(high): int(k) for _, high, k in table if k > 0}
    return section


def config_yaml(d: Deployment) -> str:
    """The whole file, ending in a newline."""
    document: dict[str, Any] = {}
    if d.utilization is not None:
        document["kv_cache_config"] = {"free_gpu_memory_fraction": round(d.utilization, 2)}
        if d.kv_dtype.startswith("fp8"):
            document["kv_cache_config"]["dtype"] = "fp8"
    section = speculative_section(d)
    if section:
        document["speculative_config"] = section
    document["enable_iter_perf_stats"] = True
    return to_yaml(document) + "\n"


def flags(d: Deployment) -> list[str]:
    """The flags beside the file."""
    argv = ["--max_seq_len", str(d.max_model_len)]
    if d.tensor_parallel > 1:
        argv += ["--tp_size", str(d.tensor_parallel)]
    if d.max_num_seqs is not None:
        argv += ["--max_batch_size", str(d.max_num_seqs)]
    return argv


def render(d: Deployment) -> Command:
    """Write the file, then ``trtllm-serve MODEL --config FILE``."""
    text = config_yaml(d)
    argv = ["trtllm-serve", d.model.path or d.model.id, "--host", d.host, "--port", str(d.port)]
    argv += [*flags(d), "--config", CONFIG_FILE]
    write = " ".join(shlex.quote(line) for line in text.splitlines())
    return Command(
        tuple(argv), f"printf '%s\\n' {write} > {CONFIG_FILE} && {shell_line(argv)}", {CONFIG_FILE: text}, _NOTES
    )
