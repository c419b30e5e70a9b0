"""The facts of ``rules/models.toml``: shapes and sizes of common targets, so that a plan needs no network."""

from __future__ import annotations

from functools import cache
from typing import Any

from surespec.memory import parameter_count, weight_bytes
from surespec.plan_nouns import GIB, KVGroup, Model
from surespec.rules import load_topic


@cache
def _table() -> dict[str, Model]:
    """Every id and alias, in lower case -> its facts."""
    table: dict[str, Model] = {}
    for entry in load_topic("models")["model"]:
        model = _model(entry, entry["id"], ())
        for name in (entry["id"], *entry.get("aliases", ())):
            # An alias of another repository is served under its own name; a bare alias under the canonical one.
            table[name.lower()] = model.model_copy(update={"id": name}) if "/" in name else model
        for variant in entry.get("variants", ()):
            table[variant["id"].lower()] = _model({**entry, "gated": False, **variant}, variant["id"], (entry["id"],))
    return table


def _model(entry: dict[str, Any], model_id: str, target_of: tuple[str, ...]) -> Model:
    sliding = entry.get("sliding_layers", 0)
    dims = {"kv_heads": entry["num_kv_heads"], "head_dim_k": entry["head_dim"], "head_dim_v": entry["head_dim"]}
    groups = [KVGroup(kind="full", layers=entry["num_layers"] - sliding, **dims)]
    if sliding:
        groups.append(KVGroup(kind="sliding", layers=sliding, window=entry["sliding_window"], **dims))
    shape = Model(
        id=model_id,
        architecture=entry["architecture"],
        model_type=entry["model_type"],
        hidden_size=entry["hidden_size"],
        intermediate_size=entry["intermediate_size"],
        num_layers=entry["num_layers"],
        num_heads=entry["num_heads"],
        vocab_size=entry["vocab_size"],
        max_position_embeddings=entry["max_position_embeddings"],
        tie_word_embeddings=entry["tie_word_embeddings"],
        num_experts=entry.get("num_experts", 0),
        experts_per_token=entry.get("experts_per_token", 0),
        quantization=entry["quantization"],
        parameters=entry["params"],
        weight_bytes=0,
        weight_source=entry["weight_source"],
        kv_groups=tuple(groups),
        target_of=target_of,
        gated=entry.get("gated", False),
        license=entry["license"],
        source=f"bundled facts ({entry['source']})",
    )
    return shape.model_copy(update={"weight_bytes": _weights(shape, entry)})


def _weights(shape: Model, entry: dict[str, Any]) -> int:
    """Measured or published size when the table has one; else parameters (16 bit) or the formula."""
    if "weight_gib" in entry:
        return round(float(entry["weight_gib"]) * GIB)
    if shape.quantization == "bf16":
        return 2 * (shape.parameters or parameter_count(shape))
    return weight_bytes(shape, shape.quantization)


def bundled(name: str) -> Model | None:
    """The bundled facts of an id or alias (case does not matter), or None."""
    return _table().get(name.lower())


def bundled_ids() -> tuple[str, ...]:
    """The ids of the table, aliases left out, variants in."""
    entries = load_topic("models")["model"]
    return tuple(i for entry in entries for i in (entry["id"], *(v["id"] for v in entry.get("variants", ()))))


def canonical_ids() -> tuple[str, ...]:
    """The ids of the table without variants."""
    return tuple(entry["id"] for entry in load_topic("models")["model"])


def variants_of(model: Model) -> tuple[Model, ...]:
    """Other checkpoints of the same weights, smallest first: same base, other precision."""
    bases = {model.id, *model.target_of}
    known = [_table()[name.lower()] for name in bundled_ids()]
    found = [m for m in known if bases & {m.id, *m.target_of} and m.quantization != model.quantization]
    return tuple(sorted(found, key=lambda m: m.weight_bytes))
