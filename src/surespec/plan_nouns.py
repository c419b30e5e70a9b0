"""The nouns of planning: what is here, what is to be served, and what could be done about it.

All frozen; units stand in the field names; bytes are plain integers. Made by ``probe``, ``models`` and the rule tables,
consumed by ``memory``, ``plan`` and ``dialects``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from surespec.core import Arm, Noun

GIB = 1024**3

EngineName = Literal["vllm", "sglang", "trtllm", "llamacpp", "dynamo", "local"]
ENGINE_NAMES: tuple[EngineName, ...] = ("vllm", "sglang", "trtllm", "llamacpp", "dynamo", "local")
DeviceKind = Literal["jetson", "unified", "gpu", "cpu"]


class Device(Noun):
    """One machine. ``memory_bytes`` is what an engine can see, ``available_bytes`` what is free now (None: not read).

    ``reclaimable_bytes`` are held by GPU programs now, such as the deployment a plan would replace (M7).
    ``sku`` is the table's id (``thor-t5000``), ``family`` groups boards that share rules. ``unified`` means that CPU
    and GPU share the memory. ``assumed`` names the facts that were not read but taken from the table.
    """

    sku: str
    name: str
    family: str
    kind: DeviceKind
    memory_gb: float
    memory_bytes: int
    available_bytes: int | None = None
    reclaimable_bytes: int = 0
    bandwidth_gb_s: float | None = None
    compute_capability: str = ""
    fp8: bool = False
    fp4: bool = False
    bf16: bool = True
    gpus: int = 1
    l4t: str = ""
    jetpack: str = ""
    power_mode: str = ""
    in_container: bool = False
    simulated: bool = False
    default_utilization: float = 0.90
    default_max_model_len: int = 8192
    assumed: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def unified(self) -> bool:
        """True where CPU and GPU share one memory."""
        return self.kind in ("jetson", "unified", "cpu")


class Runtime(Noun):
    """The engine that will serve. ``version`` is empty when unknown; ``oldest`` is then the oldest it can be (V4)."""

    engine: EngineName
    version: str = ""
    oldest: str = ""
    image: str = ""
    ipc_host: bool = False
    host_engine: str = "vllm"
    source: str = ""
    speculating: bool = False

    @property
    def gate(self) -> str:
        """The version that decides which fields may be written; empty when nothing at all is known."""
        return self.version or self.oldest


class KVGroup(Noun):
    """Layers that cache alike.

    ``full``: ``kv_heads x (head_dim_k + head_dim_v)`` values a token. ``sliding``: the same for at most ``window``
    tokens. ``mla``: one latent of ``head_dim_k`` values a token. ``state``: ``state_bytes`` a request, however long.
    """

    kind: Literal["full", "sliding", "mla", "state"]
    layers: int
    kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    window: int = 0
    state_bytes: int = 0


class Model(Noun):
    """A target or a draft: shape, weights and cache, no tensors.

    ``target_of``: ids this checkpoint was made from, nearest first (its base for a quantised or fine-tuned variant).
    ``drafts`` is the method a drafting head's configuration says (``eagle3`` ...), empty for a model of its own.
    ``intermediate_size`` is one expert's for a mixture of experts.
    """

    id: str
    architecture: str = ""
    model_type: str = ""
    hidden_size: int
    intermediate_size: int = 0
    num_layers: int
    num_heads: int
    vocab_size: int
    max_position_embeddings: int = 0
    tie_word_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    quantization: str = "bf16"
    parameters: int = 0
    weight_bytes: int
    weight_source: str = ""
    kv_groups: tuple[KVGroup, ...] = ()
    mtp_layers: int = 0
    draft_vocab_size: int = 0
    drafts: str = ""
    target_of: tuple[str, ...] = ()
    gated: bool = False
    license: str = ""
    path: str = ""
    format: Literal["safetensors", "gguf"] = "safetensors"
    tokenizer_hash: str = ""
    source: str = ""

    @property
    def hybrid(self) -> bool:
        """True when some layers keep a state instead of a cache (Mamba, GDN)."""
        return any(group.kind == "state" for group in self.kv_groups)


class Drafter(Noun):
    """What proposes tokens in an arm, with what it costs in memory.

    ``match``: ``exact`` for the checkpoint it was trained on, ``variant`` for a quantised or otherwise derived one,
    ``shape`` when only architecture and vocabulary agree (H1). ``max_k`` is a head's block (0: none),
    ``n_predict`` the number of MTP layers, ``context`` the trained context, 0 when not known.
    """

    method: str
    id: str = ""
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    match: Literal["exact", "variant", "shape", "own", "none"] = "none"
    context: int = 0
    license: str = ""
    evidence: str = ""
    source: str = ""
    rank: int = 9
    engines: dict[str, str] = Field(default_factory=dict)
    parallel_drafting: bool = False
    max_k: int = 0
    n_predict: int = 1
    estimated: bool = False
    gated: bool = False


class MemoryBudget(Noun):
    """How the memory of one launch is spent, all in bytes. ``kv`` is what is left; ``kv_needed`` what must be there.

    ``margin`` is the smaller of the two slacks: KV beyond what is needed, and available memory beyond what the engine
    asks for and the system's reserve. ``fits`` is ``margin >= 0``.
    """

    total: int
    available: int
    requested: int
    reserve: int
    weights: int
    drafter: int
    activation: int
    non_torch: int
    graphs: int
    kv: int
    kv_needed: int
    kv_tokens: int
    kv_bytes_per_token: int
    margin: int
    fits: bool
    short_of: Literal["", "kv", "admission", "weights"] = ""

    @property
    def margin_gib(self) -> float:
        """The margin in GiB, two decimals."""
        return round(self.margin / GIB, 2)


class Change(Noun):
    """One change that helps a launch to fit: a flag and its value (``model`` for another checkpoint)."""

    flag: str
    value: str
    why: str
    rule: str = ""


class Tuning(Noun):
    """Something beyond k that is worth a try after the plain arm, with the rule behind it."""

    rule: str
    flag: str
    value: str
    why: str


class Refusal(Noun):
    """What is not planned: the rule, why it applies here, and what could be done instead."""

    method: str
    rule: str
    why: str
    instead: tuple[str, ...] = ()


class PlannedArm(Noun):
    """One arm worth trying. ``speculative_config`` is in vLLM's words whatever the engine; ``command`` is the engine's.

    ``files`` are files the command needs beside it (name -> text). ``break_even_length`` is the acceptance length at
    which the arm stops being slower, from the bytes a step reads; an estimate, never a promise.
    """

    name: str
    method: str
    num_speculative_tokens: int
    speculative_config: dict[str, Any]
    gpu_memory_utilization: float | None
    fits: bool
    margin_gib: float
    rules: tuple[str, ...]
    command: str
    argv: tuple[str, ...] = ()
    files: dict[str, str] = Field(default_factory=dict)
    drafter: Drafter | None = None
    memory: MemoryBudget | None = None
    changes: tuple[Change, ...] = ()
    tuning: tuple[Tuning, ...] = ()
    notes: tuple[str, ...] = ()
    break_even_length: float | None = None

    def arm(self) -> Arm:
        """The core noun that ``tune`` launches."""
        return Arm(
            name=self.name,
            method=self.method,
            num_speculative_tokens=self.num_speculative_tokens,
            speculative_config=self.speculative_config,
        )


class PlanOptions(Noun):
    """What the user asked for. None means: the device's or the rules' value.

    ``already_speculates``: the recipe has a speculative config, so its utilization was lowered before (C5).
    ``ttft_share``: part of a request's time that is TTFT in a baseline run (W6), when measured.
    """

    concurrency: tuple[int, ...] = (1, 8)
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    tokens_per_request: int = 2048 + 128
    tensor_parallel: int = 1
    already_speculates: bool = False
    ttft_share: float | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    kubernetes: bool = False
    old_llamacpp_flags: bool = False


class GuideStep(Noun):
    """One step of a quick start: what it is for, what to type, and why so."""

    title: str
    text: str
    why: str = ""


class Plan(Noun):
    """The answer of ``surespec plan`` (schema ``surespec/plan/1``). Arms best first; what does not fit comes last."""

    device: Device
    runtime: Runtime
    model: Model
    kv_bytes_per_token: int
    baseline: MemoryBudget | None
    baseline_command: str
    gpu_memory_utilization: float
    max_model_len: int
    arms: tuple[PlannedArm, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]
    guide: tuple[GuideStep, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 when an arm is worth trying, 10 when none is."""
        return 0 if any(arm.fits for arm in self.arms) else 10

    def document(self) -> dict[str, Any]:
        """The JSON document, with the contract's fields first."""
        body = self.model_dump(mode="json")
        model = body.pop("model")
        model = {
            "id": model.pop("id"),
            "weight_bytes": model.pop("weight_bytes"),
            "kv_bytes_per_token": body.pop("kv_bytes_per_token"),
            **model,
        }
        return {"schema": "surespec/plan/1", "device": body.pop("device"), "model": model, **body}
