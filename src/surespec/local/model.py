"""The target model: weights -> one ONNX graph -> ``forward`` over a batch of chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surespec.errors import EngineError, UsageError
from surespec.local.batch import BoundSession
from surespec.local.graph import PRECISIONS, AttentionShape, GraphBuilder, default_threads, rope_tables
from surespec.local.kv import KVCache
from surespec.local.types import FloatArray, ForwardOutput, ModelConfig, SeqChunk
from surespec.local.weights import ModelFiles


class TargetModel:
    """A Llama-family model ready to run.

    ``precision``: fp32 (the reference), int8 or int4 (weights in blocks of 32; embeddings stay as they are).
    ``aux_layers``: layers whose entering residual streams ``forward`` also returns. ``threads``: default one a physical
    core. ``embedding`` (vocab, hidden) is shared with drafters. Not thread-safe.
    """

    def __init__(
        self,
        files: ModelFiles,
        precision: str = "fp32",
        aux_layers: tuple[int, ...] = (),
        threads: int | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise UsageError(f"Precision '{precision}' is not known.", hint=f"Use one of {', '.join(PRECISIONS)}.")
        self.config: ModelConfig = files.config
        self.files = files
        self.precision = precision
        self.aux_layers = aux_layers
        self.threads = threads or default_threads()
        for layer in aux_layers:
            if not 0 <= layer < self.config.num_layers:
                raise UsageError(
                    f"Layer {layer} does not exist; {files.path} has layers 0 to {self.config.num_layers - 1}."
                )
        self.embedding: FloatArray = files.tensors["model.embed_tokens.weight"]
        self.shape = attention_shape(self.config)
        session = build_target(files, self.embedding, precision, aux_layers).session(self.threads)
        self._bound = BoundSession(session, self.shape)

    def lm_head(self) -> FloatArray:
        """The output matrix (vocab, hidden), read anew from the file, or the shared embedding."""
        if self.config.tie_word_embeddings:
            return self.embedding
        return self.files.tensors["lm_head.weight"]

    def new_cache(self, max_slots: int, max_len: int, max_tokens: int | None = None) -> KVCache:
        """An empty cache for this model. ``max_len`` is cut to the model's own maximum."""
        c = self.config
        longest = min(max_len, c.max_position_embeddings)
        return KVCache(c.num_layers, c.num_kv_heads, c.head_dim, max_slots, longest, max_tokens)

    def forward(self, chunks: Sequence[SeqChunk], cache: KVCache) -> ForwardOutput:
        """Run ``chunks`` (slots ascending without gaps, any mix of lengths) and write their K and V into ``cache``.

        Returns logits for the rows asked for, in chunk order, and the auxiliary states when configured. A row's result
        does not depend on what else is in the batch. EngineError for an empty chunk, a slot not in use, a token outside
        the vocabulary, or a sequence beyond the cache's maximum.
        """
        lengths = tuple(len(chunk.token_ids) for chunk in chunks)
        if not lengths or min(lengths) < 1:
            raise EngineError("A forward pass needs at least one chunk, and every chunk at least one token.")
        tokens = np.concatenate([chunk.token_ids for chunk in chunks])
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise EngineError(f"A token id lies outside the vocabulary of {self.config.vocab_size}.")
        firsts = np.cumsum((0, *lengths[:-1]))
        asked = [np.arange(f + c.logits_from, f + n) for f, c, n in zip(firsts, chunks, lengths, strict=True)]
        rows = np.concatenate(asked).astype(np.int64)
        inputs = {"x": self.embedding[tokens], "logit_rows": rows}
        logits = np.empty((len(rows), self.config.vocab_size), np.float32)
        outputs = {"logits": logits}
        aux = None
        if self.aux_layers:
            aux = np.empty((len(tokens), len(self.aux_layers) * self.config.hidden_size), np.float32)
            outputs["aux"] = aux
        slots, starts = [c.slot for c in chunks], [c.start for c in chunks]
        self._bound.run(slots, starts, lengths, cache, inputs, outputs)
        return ForwardOutput(logits=logits, aux=aux)


def attention_shape(config: ModelConfig) -> AttentionShape:
    """The attention part of a configuration."""
    return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)


def build_target(files: ModelFiles, embedding: FloatArray, precision: str, aux_layers: tuple[int, ...]) -> GraphBuilder:
    """The graph: x (n, hidden) -> logits (rows asked for, vocab), and aux (n, len(aux_layers) * hidden)."""
    c, tensors, shape = files.config, files.tensors, attention_shape(files.config)
    g = GraphBuilder(precision)
    g.input("x", ["n", c.hidden_size])
    g.input("logit_rows", ["rows"], 7)
    g.attention_inputs(shape, *rope_tables(c, c.max_position_embeddings))
    residual = "x"
    normed = g.rms_norm("x", "l0.n1", tensors["model.layers.0.input_layernorm.weight"], c.rms_norm_eps)
    entering: list[str] = []
    for layer in range(c.num_layers):
        at, name = f"model.layers.{layer}.", f"l{layer}"
        entering.append(residual)
        weight = np.concatenate([tensors[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"])
        bias = None
        if c.attention_bias:
            bias = np.concatenate([tensors[f"{at}self_attn.{x}_proj.bias"] for x in "qkv"])
        qkv = g.linear(normed, f"{name}.qkv", weight, bias)
        attended = g.attention(qkv, layer, shape, _qk_norm(files, layer))
        mixed = g.linear(attended, f"{name}.o", tensors[at + "self_attn.o_proj.weight"])
        after = tensors[at + "post_attention_layernorm.weight"]
        normed, residual = g.add_rms_norm(mixed, residual, f"{name}.n2", after, c.rms_norm_eps)
        gate_up = np.concatenate([tensors[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        out = g.mlp(normed, f"{name}.mlp", gate_up, tensors[at + "mlp.down_proj.weight"])
        last = layer + 1 == c.num_layers
        next_norm = "model.norm.weight" if last else f"model.layers.{layer + 1}.input_layernorm.weight"
        normed, residual = g.add_rms_norm(out, residual, f"l{layer + 1}.n1", tensors[next_norm], c.rms_norm_eps)
    wanted = g.node("Gather", [normed, "logit_rows"], "final", axis=0)
    g.linear(wanted, "logits", embedding if c.tie_word_embeddings else tensors["lm_head.weight"])
    g.output("logits", ["rows", c.vocab_size])
    if aux_layers:
        g.node("Concat", [entering[layer] for layer in aux_layers], "aux", axis=1)
        g.output("aux", ["n", len(aux_layers) * c.hidden_size])
    return g


def _qk_norm(files: ModelFiles, layer: int) -> tuple[FloatArray, float] | None:
    """Qwen3's norm weights as one (rows, head_dim) table: q's for query heads, k's for keys, ones for values."""
    c = files.config
    if not c.qk_norm:
        return None
    at = f"model.layers.{layer}.self_attn."
    table = np.ones((c.num_heads + 2 * c.num_kv_heads, c.head_dim), np.float32)
    table[: c.num_heads] = files.tensors[at + "q_norm.weight"]
    table[c.num_heads : c.num_heads + c.num_kv_heads] = files.tensors[at + "k_norm.weight"]
    return table, c.rms_norm_eps
