"""Which head and draft to try on a target: what the user names, then what comes with surespec, then the tables."""

from __future__ import annotations

from dataclasses import dataclass

from surespec.errors import ModelError, SurespecError
from surespec.fetch import known_models, packaged_head
from surespec.models import resolve
from surespec.plan.heads import draft_for, heads_for
from surespec.plan_nouns import Model

TABLE_ENGINES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "trtllm",
    "dynamo": "vllm",
    "dynamo-sglang": "sglang",
    "dynamo-trtllm": "trtllm",
}
"""Engines that load a published head by its Hugging Face id, and the engine inside, whose heads they are; llama.cpp
wants it converted, the embedded one local."""

NO_HEAD = "No EAGLE-3 head is known for this model (rule W3); name one with --eagle3-head."

_BY_FOLDER = "There is an EAGLE-3 head for this model, {head}. Download it and give its folder with --eagle3-head."
_TO_FETCH = {
    "llamacpp": "There is an EAGLE-3 head for this model, {head}. llama.cpp reads heads as GGUF only: convert it with "
    "llama.cpp's convert_hf_to_gguf.py and give the file with --eagle3-head."
}
"""What to say where a published head has to be brought into a form first."""


@dataclass(frozen=True, slots=True)
class KnownDrafters:
    """The EAGLE-3 head and the draft model to try, None without one, and what a person should know about them."""

    eagle3_head: str | None = None
    draft_model: str | None = None
    remark: str = ""


def known_drafters(model: str, engine: str, eagle3_head: str | None, draft_model: str | None) -> KnownDrafters:
    """Head first (C1); a same-family draft from the table only where no head is known (C2)."""
    if eagle3_head is not None:
        return KnownDrafters(eagle3_head, draft_model)
    asset = known_models().get(model)
    if asset is not None and asset.eagle3_head:
        try:
            packaged_head(asset.eagle3_head)
        except ModelError as error:
            return KnownDrafters(None, draft_model, error.message)
        return KnownDrafters(asset.eagle3_head, draft_model)
    target = _facts(model)
    if target is None:
        return KnownDrafters(None, draft_model, NO_HEAD)
    if engine not in TABLE_ENGINES:
        head = _published_head(target, "llamacpp" if engine == "llamacpp" else "")
        return KnownDrafters(
            None, draft_model, NO_HEAD if head is None else _TO_FETCH.get(engine, _BY_FOLDER).format(head=head)
        )
    head = _published_head(target, TABLE_ENGINES[engine])
    if head is not None:
        return KnownDrafters(head, draft_model, f"EAGLE-3 head from the table of published ones: {head}.")
    if draft_model is None and (found := draft_for(target)[0]) is not None:
        return KnownDrafters(None, found.id, f"{NO_HEAD} Instead a draft of the same family is tried: {found.id} (C2).")
    return KnownDrafters(None, draft_model, NO_HEAD)


def _published_head(target: Model, engine: str = "") -> str | None:
    """The best head trained for this target or a variant of it that the engine (an empty text: any) serves; none that
    only has its shape."""
    for head in heads_for(target):
        served = not head.engines or not engine or engine in head.engines
        if head.method == "eagle3" and head.match != "shape" and served and not head.parallel_drafting:
            return head.id
    return None


def _facts(model: str) -> Model | None:
    """The shape of the target; None when it cannot be had, which a launch will explain better."""
    try:
        return resolve(model)
    except SurespecError:
        return None
