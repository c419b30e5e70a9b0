"""EAGLE-3 draft heads, read from the checkpoints that vLLM loads (``LlamaForCausalLMEagle3``).

A head is one decoder layer (``midlayer``) over the target's own features. Conventions, as in vLLM's ``llama_eagle3``:

* aux[t] is the target's residual stream entering three layers at position t, concatenated; ``fc`` brings it to hidden
  size;
* the first draft step at position t sees embed(token[t + 1]) beside fc(aux[t]) and predicts token[t + 2]: tokens are
  shifted by one, positions are not;
* later steps see the embedding of the draft before and the head's own output before its last norm, at t + 1, t + 2 ...;
* q, k and v see cat(input_layernorm(embedding), hidden_norm(hidden)); the residual is the hidden state itself
  (or its norm, when the config says ``norm_before_residual``).

Use: the head's cache mirrors the target's slots (``alloc`` and ``free`` on both). After each target pass call
``extend`` with the verified tokens' features; its K and V replace what draft steps left at those positions. Then
``step`` k - 1 times, with ``starts`` one further each time. ``target`` must have been built with
``aux_layers=read_aux_layers(...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from surespec.errors import ModelError
from surespec.local.batch import BoundSession
from surespec.local.graph import AttentionShape, GraphBuilder, rope_tables
from surespec.local.kv import KVCache
from surespec.local.model import TargetModel
from surespec.local.types import FloatArray, IntArray, ModelConfig
from surespec.local.weights import Fields, check_config, open_safetensors, read_json, rope_settings

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3Model")
HINT = "Use a head that was trained for this target."


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """One draft step for B sequences: ``hidden`` (B, hidden) before the last norm, which the next step takes;
    ``token_ids`` (B,) the likeliest target ids; ``logits`` (B, draft_vocab) when asked for, in draft ids."""

    hidden: FloatArray
    token_ids: IntArray
    logits: FloatArray | None


def read_head_config(path: Path) -> dict[str, Any]:
    """The head's config.json. ModelError when ``path`` is no folder with an EAGLE-3 head."""
    if not (path / "config.json").exists():
        raise ModelError(f"No EAGLE-3 head at {path}: there is no config.json.", hint="Give the head's folder.")
    raw = read_json(path / "config.json")
    architecture = (raw.get("architectures") or ["none named"])[0]
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path}: architecture '{architecture}' is not an EAGLE-3 head ({ARCHITECTURES[0]} is).",
            hint="For a small complete model use the method draft_model.",
        )
    return raw


def read_aux_layers(path: Path, num_layers: int) -> tuple[int, ...]:
    """The three target layers whose entering states the head at ``path`` was trained on.

    From ``eagle_aux_hidden_state_layer_ids`` (top level or in ``eagle_config``); default as in vLLM: 2, half, last but
    two. ModelError when they are not three layers of a target with ``num_layers``.
    """
    raw = read_head_config(path)
    nested = raw.get("eagle_config")
    found = raw.get("eagle_aux_hidden_state_layer_ids")
    if found is None and isinstance(nested, dict):
        found = nested.get("eagle_aux_hidden_state_layer_ids")
    if found is None:
        found = [2, num_layers // 2, num_layers - 3]
    whole = isinstance(found, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in found)
    if not whole or len(found) != 3 or not all(0 <= i < num_layers for i in found):
        raise ModelError(
            f"{path}: the auxiliary layers are {found}, but the target has layers 0 to {num_layers - 1}.", hint=HINT
        )
    return tuple(found)


class Eagle3Head:
    """A draft head ready to run beside ``target``, whose embedding (and output matrix, when it has none) it shares.

    ``draft_vocab``; ``d2t`` (draft_vocab,): the target id of each draft id (absolute, not the checkpoint's offsets).
    Precision: fp32 beside an fp32 target, else int8. ModelError, before anything runs, when the head does not fit.
    """

    def __init__(self, path: Path, target: TargetModel) -> None:
        self.path = path
        self.aux_layers = read_aux_layers(path, target.config.num_layers)
        if self.aux_layers != target.aux_layers:
            raise ModelError(
                f"{path} reads the target's layers {self.aux_layers}, "
                f"but the target was loaded to give {target.aux_layers or 'none'}.",
                hint="Load the target with the head's auxiliary layers.",
            )
        raw = read_head_config(path)
        self.config = _config(raw, path, target.config)
        weights = _HeadWeights(path, self.config, target)
        self.d2t: IntArray = weights.draft_to_target()
        self.draft_vocab = len(self.d2t)
        self.embedding: FloatArray = weights.optional("embed_tokens.weight", target.embedding)
        precision = "fp32" if target.precision == "fp32" else "int8"
        self._shape = AttentionShape(self.config.num_heads, self.config.num_kv_heads, self.config.head_dim)
        fc = GraphBuilder(precision)
        fc.input("aux", ["n", 3 * self.config.hidden_size])
        fc.linear("aux", "hidden", weights["fc.weight"])
        fc.output("hidden", ["n", self.config.hidden_size])
        self._fc = fc.session(target.threads)
        graph = _build(weights, self._shape, self.d2t, target, precision, bool(raw.get("norm_before_residual")))
        self._bound = BoundSession(graph.session(target.threads), self._shape, last_only=True)

    def new_cache(self, max_slots: int, max_len: int) -> KVCache:
        """An empty cache for the head's one layer."""
        c = self.config
        return KVCache(1, c.num_kv_heads, c.head_dim, max_slots, min(max_len, c.max_position_embeddings))

    def extend(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        next_tokens: Sequence[IntArray],
        aux: Sequence[FloatArray],
        cache: KVCache,
        want_logits: bool = False,
    ) -> DraftOutput:
        """First draft step. Sequence i: ``aux[i]`` (n_i, 3 * hidden) of positions ``starts[i]`` on, and the tokens that
        followed each of them, ``next_tokens[i]`` (n_i,). ``slots`` ascend without gaps. Predicts the token after the
        last of ``next_tokens[i]``."""
        lengths = tuple(len(tokens) for tokens in next_tokens)
        (hidden,) = self._fc.run(None, {"aux": np.concatenate(aux)})
        return self._run(slots, starts, lengths, np.concatenate(next_tokens), hidden, cache, want_logits)

    def step(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        token_ids: IntArray,
        hidden: FloatArray,
        cache: KVCache,
        want_logits: bool = False,
    ) -> DraftOutput:
        """A later draft step: ``token_ids`` (B,) target ids drafted before, ``hidden`` (B, hidden) of that step, at
        positions ``starts`` (one more than the step before)."""
        return self._run(slots, starts, (1,) * len(slots), token_ids, hidden, cache, want_logits)

    def _run(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        lengths: tuple[int, ...],
        tokens: IntArray,
        hidden: FloatArray,
        cache: KVCache,
        want_logits: bool,
    ) -> DraftOutput:
        count = len(slots)
        last = np.cumsum(lengths) - 1
        hidden = np.asarray(hidden, np.float32)
        inputs: dict[str, NDArray[Any]] = {"x": self.embedding[tokens], "hidden": hidden, "last_rows": last}
        out = np.empty((count, self.config.hidden_size), np.float32)
        best = np.empty(count, np.int64)
        outputs: dict[str, NDArray[Any]] = {"next_hidden": out, "token_ids": best}
        logits = np.empty((count, self.draft_vocab), np.float32)
        outputs["logits"] = logits
        self._bound.run(slots, starts, lengths, cache, inputs, outputs)
        return DraftOutput(out, best, logits if want_logits else None)


def _config(raw: dict[str, Any], path: Path, target: ModelConfig) -> ModelConfig:
    """The head's shape, checked against the target's."""
    where = path / "config.json"
    fields = Fields(raw, where)
    hidden, vocab = fields.integer("hidden_size"), fields.integer("vocab_size", target.vocab_size)
    if hidden != target.hidden_size:
        raise ModelError(
            f"{path} is a head for hidden size {hidden}; the target's hidden size is {target.hidden_size}.", hint=HINT
        )
    if vocab != target.vocab_size:
        raise ModelError(
            f"{path} is a head for a vocabulary of {vocab} tokens; the target's has {target.vocab_size}.", hint=HINT
        )
    if fields.integer("num_hidden_layers", 1) != 1 or raw.get("norm_before_fc"):
        raise ModelError(f"{where}: only heads of one layer without 'norm_before_fc' are supported.", hint=HINT)
    heads = fields.integer("num_attention_heads")
    theta, scaling = rope_settings(raw, fields)
    config = replace(
        target,
        architecture="llama",
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=1,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // max(heads, 1)),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention_bias=False,
        qk_norm=False,
    )
    return check_config(config, where)


class _HeadWeights:
    """The head's tensors under one naming (``midlayer.`` ...), each checked against the shape it must have."""

    def __init__(self, path: Path, config: ModelConfig, target: TargetModel) -> None:
        self.path = path
        self.config = config
        self._target = target
        self._files = {}
        for name, file in open_safetensors(path).items():
            plain = name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
            self._files[plain] = (file, name)
        hidden, inter, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        m = "midlayer."
        self._shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, 3 * hidden),
            "norm.weight": (hidden,),
            "embed_tokens.weight": (vocab, hidden),
            m + "hidden_norm.weight": (hidden,),
            m + "input_layernorm.weight": (hidden,),
            m + "post_attention_layernorm.weight": (hidden,),
            m + "self_attn.q_proj.weight": (q, 2 * hidden),
            m + "self_attn.k_proj.weight": (kv, 2 * hidden),
            m + "self_attn.v_proj.weight": (kv, 2 * hidden),
            m + "self_attn.o_proj.weight": (hidden, q),
            m + "mlp.gate_proj.weight": (inter, hidden),
            m + "mlp.up_proj.weight": (inter, hidden),
            m + "mlp.down_proj.weight": (hidden, inter),
        }
        for name in self._shapes:
            if name != "embed_tokens.weight" or name in self._files:
                self._check(name)

    def _check(self, name: str) -> None:
        if name not in self._files:
            raise ModelError(f"{self.path} has no tensor '{name}'.", hint="The head is incomplete; fetch it again.")
        file, stored = self._files[name]
        if file.shapes[stored] != self._shapes[name]:
            raise ModelError(
                f"{self.path}: tensor '{stored}' has shape {file.shapes[stored]}, "
                f"but a head for this target needs {self._shapes[name]}.",
                hint=HINT,
            )

    def __getitem__(self, name: str) -> FloatArray:
        file, stored = self._files[name]
        return file.read_float32(stored)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def optional(self, name: str, default: FloatArray) -> FloatArray:
        """The tensor, or ``default`` (the target's) when the checkpoint has none."""
        return self[name] if name in self._files else default

    def draft_to_target(self) -> IntArray:
        """Target id of each draft id: the checkpoint's offsets ``d2t`` plus the draft id; the identity without them."""
        vocab = self.config.vocab_size
        rows = vocab
        if "lm_head.weight" in self._files:
            file, stored = self._files["lm_head.weight"]
            rows = file.shapes[stored][0]
            self._shapes["lm_head.weight"] = (rows, self.config.hidden_size)
            self._check("lm_head.weight")
        if "d2t" in self._files:
            file, stored = self._files["d2t"]
            offsets = file.read(stored)
            ids = np.arange(len(offsets), dtype=np.int64) + offsets.astype(np.int64).reshape(-1)
        else:
            ids = np.arange(rows, dtype=np.int64)
        if len(ids) != rows or rows > vocab:
            raise ModelError(
                f"{self.path}: 'd2t' maps {len(ids)} draft tokens, but the head scores {rows} "
                f"(the target's vocabulary has {vocab}).",
                hint=HINT,
            )
        if "d2t" not in self._files and rows != vocab:
            raise ModelError(
                f"{self.path}: the head scores {rows} of the target's {vocab} tokens, but has no 'd2t' to say which.",
                hint=HINT,
            )
        if ids.min() < 0 or ids.max() >= vocab:
            raise ModelError(
                f"{self.path}: 'd2t' points at token {int(ids.max())}; the target's vocabulary has {vocab}.", hint=HINT
            )
        return ids


def _build(
    w: _HeadWeights, shape: AttentionShape, d2t: IntArray, target: TargetModel, precision: str, norm_residual: bool
) -> GraphBuilder:
    """Graph: x and hidden (n, hidden) -> next_hidden (B, hidden), token_ids (B,), logits (B, draft_vocab)."""
    c, m = w.config, "midlayer."
    g = GraphBuilder(precision)
    g.input("x", ["n", c.hidden_size])
    g.input("hidden", ["n", c.hidden_size])
    g.input("last_rows", ["B"], TensorProto.INT64)
    g.attention_inputs(shape, *rope_tables(c, c.max_position_embeddings))
    embedded = g.rms_norm("x", "n_emb", w[m + "input_layernorm.weight"], c.rms_norm_eps)
    normed = g.rms_norm("hidden", "n_hid", w[m + "hidden_norm.weight"], c.rms_norm_eps)
    both = g.node("Concat", [embedded, normed], "both", axis=1)
    qkv = g.linear(both, "qkv", np.concatenate([w[f"{m}self_attn.{x}_proj.weight"] for x in "qkv"]))
    attended = g.attention(qkv, 0, shape, None)
    mixed = g.linear(attended, "o", w[m + "self_attn.o_proj.weight"])
    residual = g.node("Gather", [normed if norm_residual else "hidden", "last_rows"], "residual", axis=0)
    after = w[m + "post_attention_layernorm.weight"]
    normed, residual = g.add_rms_norm(mixed, residual, "n_post", after, c.rms_norm_eps)
    gate_up = np.concatenate([w[f"{m}mlp.{x}_proj.weight"] for x in ("gate", "up")])
    out = g.mlp(normed, "mlp", gate_up, w[m + "mlp.down_proj.weight"])
    normed, total = g.add_rms_norm(out, residual, "n_out", w["norm.weight"], c.rms_norm_eps)
    g.node("Identity", [total], "next_hidden")
    g.output("next_hidden", ["B", c.hidden_size])
    head = w["lm_head.weight"] if "lm_head.weight" in w else target.lm_head()
    logits = g.linear(normed, "logits", head)
    g.output("logits", ["B", len(d2t)])
    best = g.node("ArgMax", [logits], "best", axis=-1, keepdims=0)
    g.node("Gather", [g.constant("d2t", d2t), best], "token_ids", axis=0)
    g.output("token_ids", ["B"], TensorProto.INT64)
    return g
