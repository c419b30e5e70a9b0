"""SGLang: the same arm as ``--speculative-*`` flags (0.5.23, srt/arg_groups/fields/spec.py)."""

from __future__ import annotations

from surespec.dialects.base import Command, Deployment, docker_prefix, shell_line

ALGORITHMS = {
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "mtp": "NEXTN",
    "draft_model": "STANDALONE",
    "ngram": "NGRAM",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
}


def speculative_flags(d: Deployment) -> list[str]:
    """steps = k, top-k 1 and k + 1 draft tokens: SGLang wants all three or none, and top-k 1 forces steps + 1.

    Block drafters (DFlash, DSpark) take their block from the head's own configuration.
    """
    if not d.config:
        return []
    argv = ["--speculative-algorithm", ALGORITHMS[d.method]]
    if d.drafter is not None and d.drafter.id:
        argv += ["--speculative-draft-model-path", d.drafter.id]
    if d.method in ("dflash", "dspark"):
        return argv
    if d.method == "ngram":
        return [*argv, "--speculative-num-draft-tokens", str(d.k + 1)]
    return [
        *argv,
        "--speculative-num-steps",
        str(d.k),
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-draft-tokens",
        str(d.k + 1),
    ]


def flags(d: Deployment) -> list[str]:
    """The flags shared by SGLang's server and Dynamo's SGLang worker."""
    argv = ["--context-length", str(d.max_model_len)]
    if d.utilization is not None:
        argv += ["--mem-fraction-static", f"{d.utilization:.2f}"]
    if d.tensor_parallel > 1:
        argv += ["--tp-size", str(d.tensor_parallel)]
    if d.kv_dtype.startswith("fp8"):
        argv += ["--kv-cache-dtype", "fp8_e4m3"]
    if d.max_num_seqs is not None:
        argv += ["--max-running-requests", str(d.max_num_seqs)]
    return [*argv, *speculative_flags(d), "--enable-metrics"]


def render(d: Deployment) -> Command:
    """``python3 -m sglang.launch_server``, in its image on Thor."""
    argv = ["python3", "-m", "sglang.launch_server", "--model-path", d.model.path or d.model.id]
    argv += ["--host", d.host, "--port", str(d.port), *flags(d)]
    if d.device.kind == "cpu":
        argv += ["--device", "cpu"]
    if d.runtime.image:
        argv = [*docker_prefix(d, "sglang"), *argv]
    return Command(tuple(argv), shell_line(argv))
