"""Heads and drafts for a target: found by architecture and vocabulary, not by name alone (H1, H3, H4)."""

from __future__ import annotations

import re
from typing import Any, Literal

from surespec.memory import block_drafter_parameters, eagle3_parameters, kv_bytes_per_token, mtp_parameters
from surespec.models.bundled import bundled
from surespec.plan_nouns import Drafter, Model, Refusal
from surespec.rules import load_topic

Match = Literal["exact", "variant", "shape"]
_PRECISION_WORDS = re.compile(
    r"[-_.](fp8|fp4|nvfp4|mxfp4|awq|gptq|int4|int8|w4a16|w8a8|w8a16|quantized|dynamic|4bit|8bit|gguf|q\d\w*|bf16|fp16|bnb|hf)\b.*"
)


def base_name(model_id: str) -> str:
    """The name of a checkpoint without owner, ``Meta-`` and what says its precision, in lower case."""
    name = model_id.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    return _PRECISION_WORDS.sub("", name)


def match_of(entry: dict[str, Any], model: Model) -> Match | None:
    """How a head fits a target: by name and shape, as a variant of its target, by shape only, or not at all."""
    named = _same_name(entry["target"], model)
    if entry["hidden_size"] and not _same_shape(entry, model):
        return None
    if named:
        return named
    return "shape" if entry["hidden_size"] else None


def _same_shape(entry: dict[str, Any], model: Model) -> bool:
    """Hidden size, layers and vocabulary agree; a vocabulary that is not known (0) is not held against it."""
    return (
        entry["hidden_size"] == model.hidden_size
        and entry["target_layers"] == model.num_layers
        and model.vocab_size in (0, entry["vocab_size"])
    )


def _same_name(target: str, model: Model) -> Match | None:
    canonical = bundled(model.id)
    same = {model.id.lower()} | ({canonical.id.lower()} if canonical else set())
    if target.lower() in same:
        return "exact"
    if base_name(model.id) == base_name(target):
        return "variant"  # a copy, a quantised or a fine-tuned checkpoint under another owner
    if any(base_name(base) == base_name(target) for base in model.target_of):
        return "variant"
    return None


def heads_for(model: Model) -> tuple[Drafter, ...]:
    """The published heads for this target, best first; those that fit by shape only when none fits by name."""
    found: list[tuple[Match, dict[str, Any]]] = []
    for entry in load_topic("heads")["head"]:
        match = match_of(entry, model)
        if match is not None:
            found.append((match, entry))
    named = [pair for pair in found if pair[0] != "shape"]
    return tuple(sorted((_drafter(m, e, model) for m, e in named or found), key=lambda d: (d.rank, d.id)))


def _drafter(match: Match, entry: dict[str, Any], model: Model) -> Drafter:
    heads = entry.get("num_heads") or (entry["hidden_size"] // entry["head_dim"] if entry["head_dim"] else 0)
    block = entry["method"] in ("dflash", "dspark")
    layers = entry.get("draft_layers", 1)
    hidden, inner = entry["hidden_size"] or model.hidden_size, entry["intermediate_size"] or 4 * model.hidden_size
    if block:
        parameters = block_drafter_parameters(hidden, inner, heads, entry["kv_heads"], entry["head_dim"], layers)
    else:
        parameters = eagle3_parameters(
            hidden, inner, heads, entry["kv_heads"], entry["head_dim"], entry["draft_vocab_size"]
        )
    return Drafter(
        method=entry["method"],
        id=entry["id"],
        weight_bytes=2 * parameters,
        kv_bytes_per_token=layers * entry["kv_heads"] * 2 * entry["head_dim"] * 2,
        match=match,
        context=entry["max_position"],
        license=entry["license"],
        evidence=entry["evidence"],
        source=entry["source"],
        rank=entry["rank"],
        engines=entry["engines"],
        parallel_drafting=entry.get("parallel_drafting", False),
        max_k=entry.get("max_k", 0),
        estimated=entry.get("estimated_shape", False) or block,
    )


def mtp_for(model: Model) -> Drafter | None:
    """The model's own multi-token layers, or None."""
    if not model.mtp_layers:
        return None
    full = [g for g in model.kv_groups if g.kind in ("full", "mla")]
    per_layer = kv_bytes_per_token(model) // max(1, sum(g.layers for g in full))
    return Drafter(
        method="mtp",
        weight_bytes=2 * mtp_parameters(model),
        kv_bytes_per_token=model.mtp_layers * per_layer,
        match="own",
        n_predict=model.mtp_layers,
        source="the model's own layers",
        estimated=True,
        rank=1,
    )


def draft_for(model: Model) -> tuple[Drafter | None, str]:
    """A small model of the same family as a draft, or None and why not (H4)."""
    names = [base_name(name) for name in (model.id, *model.target_of)]
    why = "no same-family small draft is known for it"
    for entry in load_topic("pairs")["pair"]:
        if not any(text in name for text in entry["match"] for name in names):
            continue
        draft = bundled(entry["draft"])
        if model.vocab_size and entry["vocab_size"] != model.vocab_size:
            why = f"{entry['draft']} has {entry['vocab_size']} tokens, the target {model.vocab_size}"
            continue
        if draft is None:
            continue
        return drafter_from_model(draft, evidence=entry["evidence"], source=entry["source"]), ""
    return None, why


def drafter_from_model(draft: Model, *, evidence: str = "", source: str = "") -> Drafter:
    """An independent model as a drafter: all its weights and its own KV."""
    return Drafter(
        method="draft_model",
        id=draft.path or draft.id,
        weight_bytes=draft.weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token(draft),
        match="exact",
        context=draft.max_position_embeddings,
        license=draft.license,
        evidence=evidence,
        source=source,
        gated=draft.gated,
        rank=1,
    )


def head_problem(head: Model, target: Model) -> str:
    """Why a head's own configuration does not fit a target (H3); empty when it does. vLLM does not check this."""
    if head.hidden_size != target.hidden_size:
        return f"the head's hidden size is {head.hidden_size}, the target's {target.hidden_size}"
    if head.vocab_size and target.vocab_size and head.vocab_size != target.vocab_size:
        return f"the head's vocabulary has {head.vocab_size} tokens, the target's {target.vocab_size}"
    return ""


def draft_problem(draft: Model, target: Model) -> str:
    """Why an independent draft does not fit a target (H4); empty when it does."""
    if draft.vocab_size and target.vocab_size and draft.vocab_size != target.vocab_size:
        return f"the draft's vocabulary has {draft.vocab_size} tokens, the target's {target.vocab_size}"
    if draft.tokenizer_hash and target.tokenizer_hash and draft.tokenizer_hash != target.tokenizer_hash:
        return "the draft's tokenizer.json differs from the target's"
    return ""


def brought(draft: Model, target: Model) -> Drafter | Refusal:
    """A head or draft that the user brings, checked against the target (H3, H4)."""
    if not draft.drafts:
        problem = draft_problem(draft, target)
        if problem:
            return Refusal(method="draft_model", rule="H4", why=f"{draft.id}: {problem}.", instead=("another draft",))
        return drafter_from_model(draft, source="brought by the user")
    problem = head_problem(draft, target)
    if not problem and draft.draft_vocab_size > (target.vocab_size or draft.draft_vocab_size):
        problem = f"the head drafts from {draft.draft_vocab_size} tokens, the target has {target.vocab_size}"
    if problem:
        return Refusal(
            method=draft.drafts, rule="H3", why=f"{draft.id}: {problem}.", instead=("a head of this target",)
        )
    return Drafter(
        method=draft.drafts,
        id=draft.path or draft.id,
        weight_bytes=draft.weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token(draft),
        match="own",
        context=draft.max_position_embeddings,
        license=draft.license,
        source="brought by the user",
        rank=1,
    )


NGRAM = Drafter(method="ngram", match="none", rank=1, source="looks the text so far up; no weights")
