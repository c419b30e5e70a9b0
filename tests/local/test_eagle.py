"""EAGLE-3 heads against a plain NumPy reading of the formulas, and every way a head can fail to fit its target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import toy
from surespec.errors import ModelError
from surespec.local.eagle import Eagle3Head, read_aux_layers
from surespec.local.model import TargetModel
from surespec.local.types import FloatArray, SeqChunk
from surespec.local.weights import load_model_files

TOKENS = [np.random.default_rng(i).integers(0, 320, n) for i, n in enumerate((9, 30, 4))]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetModel:
    return TargetModel(load_model_files(target_folder), aux_layers=(2, 2, 1), threads=1)


def rms(x: FloatArray, weight: FloatArray) -> FloatArray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


class Reference:
    """One sequence through a head, written from the formulas: keys and values are lists that grow by position."""

    def __init__(self, folder: Path, embedding: FloatArray, prefix: str = "midlayer.") -> None:
        self.w = {k.replace(prefix, "m."): v for k, v in load_file(folder / "model.safetensors").items()}
        self.embedding = self.w.get("embed_tokens.weight", embedding)
        self.keys: list[FloatArray] = []
        self.values: list[FloatArray] = []

    def turn(self, heads: FloatArray, position: int) -> FloatArray:
        angle = position * 10000.0 ** (-np.arange(0, 8, 2) / 8)
        a, b = heads[:, :4], heads[:, 4:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1)

    def layer(self, token: int, hidden: FloatArray, position: int) -> FloatArray:
        """The head's output before its norm for one input at ``position``; forgets what was stored from there on."""
        w, p = self.w, "m.self_attn."
        x = np.concatenate(
            [rms(self.embedding[token], w["m.input_layernorm.weight"]), rms(hidden, w["m.hidden_norm.weight"])]
        )
        del self.keys[position:], self.values[position:]
        self.keys.append(self.turn((w[p + "k_proj.weight"] @ x).reshape(2, 8), position))
        self.values.append((w[p + "v_proj.weight"] @ x).reshape(2, 8))
        query = self.turn((w[p + "q_proj.weight"] @ x).reshape(4, 8), position)
        mixed = []
        for head in range(4):
            keys, values = (np.stack(s)[:, head // 2] for s in (self.keys, self.values))
            score = np.exp(keys @ query[head] / np.sqrt(8))
            mixed.append(score @ values / score.sum())
        out = hidden + w[p + "o_proj.weight"] @ np.concatenate(mixed)
        y = rms(out, w["m.post_attention_layernorm.weight"])
        gate = w["m.mlp.gate_proj.weight"] @ y
        return out + w["m.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (w["m.mlp.up_proj.weight"] @ y))

    def logits(self, hidden: FloatArray) -> FloatArray:
        return self.w["lm_head.weight"] @ rms(hidden, self.w["norm.weight"])


@pytest.mark.parametrize("form", [{}, {"prefix": "layers.0."}, {"prefix": "model.layers.0."}, {"own_embedding": True}])
def test_extend_and_step_follow_the_formulas_in_a_batch(
    form: dict[str, object], tmp_path: Path, target_folder: Path, target: TargetModel
) -> None:
    folder = toy.make_eagle3_head(tmp_path / "head", target_folder, **form)
    head = Eagle3Head(folder, target)
    cache = head.new_cache(3, 512)
    features = []
    for slot, tokens in enumerate(TOKENS):
        cache.alloc()
        own = target.new_cache(1, 512)
        own.alloc()
        aux = target.forward([SeqChunk(0, 0, tokens, len(tokens))], own).aux
        assert aux is not None
        features.append(aux)
        # All but the last two positions alone, then three sequences together, as prefill and decode do.
        head.extend([slot], [0], [tokens[1:-1]], [aux[:-2]], cache)
    starts = [len(t) - 2 for t in TOKENS]
    new = [np.array([t[-1], 50 + i]) for i, t in enumerate(TOKENS)]
    aux_new = [a[-2:] for a in features]
    first = head.extend([0, 1, 2], starts, new, aux_new, cache, want_logits=True)
    second = head.step([0, 1, 2], [s + 2 for s in starts], first.token_ids, first.hidden, cache, want_logits=True)
    again = head.extend([0, 1, 2], starts, new, aux_new, cache, want_logits=True)
    assert first.logits is not None
    assert second.logits is not None
    assert np.array_equal(again.logits, first.logits), "a rejected draft left a trace"
    for slot, tokens in enumerate(TOKENS):
        plain = Reference(folder, target.embedding, str(form.get("prefix", "midlayer.")))
        inputs = [*tokens[1:], 50 + slot]
        for position, token in enumerate(inputs):
            hidden = plain.layer(token, plain.w["fc.weight"] @ features[slot][position], position)
        assert np.abs(hidden - first.hidden[slot]).max() < 1e-4
        assert np.abs(plain.logits(hidden) - first.logits[slot]).max() < 1e-4
        best = int(plain.logits(hidden).argmax())
        assert first.token_ids[slot] == head.d2t[best] == best + plain.w["d2t"][best]
        hidden = plain.layer(int(first.token_ids[slot]), hidden, len(inputs))
        assert np.abs(plain.logits(hidden) - second.logits[slot]).max() < 1e-4


def test_a_full_vocabulary_head_shares_the_targets_output_matrix(
    tmp_path: Path, target_folder: Path, target: TargetModel
) -> None:
    folder = toy.make_eagle3_head(tmp_path / "head", target_folder, draft_vocab=320, own_lm_head=False)
    head = Eagle3Head(folder, target)
    assert np.array_equal(head.d2t, np.arange(320))
    cache = head.new_cache(1, 512)
    cache.alloc()
    out = head.extend([0], [0], [TOKENS[0]], [np.ones((9, 96), np.float32)], cache, want_logits=True)
    norm = load_file(folder / "model.safetensors")["norm.weight"]
    assert out.logits is not None
    assert np.abs(out.logits[0] - target.lm_head() @ rms(out.hidden[0], norm)).max() < 1e-4
    assert head.extend([0], [0], [TOKENS[0]], [np.ones((9, 96), np.float32)], cache).logits is None


def test_aux_layers_come_from_the_config_or_the_default(tmp_path: Path, target_folder: Path) -> None:
    folder = toy.make_eagle3_head(tmp_path / "h", target_folder)
    assert read_aux_layers(folder, 4) == (2, 2, 1)
    config = json.loads((folder / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_aux_layers(folder, 30) == (2, 15, 27)
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 8, 20]}
    (folder / "config.json").write_text(json.dumps(config))
    assert read_aux_layers(folder, 30) == (1, 8, 20)
    with pytest.raises(ModelError, match=r"\[1, 8, 20\], but the target has layers 0 to 9"):
        read_aux_layers(folder, 10)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 48}, "head for hidden size 48; the target's hidden size is 32"),
        ({"vocab_size": 400}, "vocabulary of 400 tokens; the target's has 320"),
        ({"num_hidden_layers": 2}, "only heads of one layer"),
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not an EAGLE-3 head"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, r"reads the target's layers \(0, 1, 2\)"),
        ({"num_attention_heads": 5}, "5 heads cannot be shared by 2"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_use(
    overrides: dict[str, object], message: str, tmp_path: Path, target_folder: Path, target: TargetModel
) -> None:
    folder = toy.make_eagle3_head(tmp_path / "head", target_folder)
    config = json.loads((folder / "config.json").read_text()) | overrides
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        Eagle3Head(folder, target)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path, target_folder: Path, target: TargetModel) -> None:
    folder = toy.make_eagle3_head(tmp_path / "head", target_folder)
    good = load_file(folder / "model.safetensors")
    changes: list[tuple[str, np.ndarray | None, str]] = [
        ("fc.weight", np.zeros((32, 64), np.float32), r"'fc.weight' has shape \(32, 64\), .* needs \(32, 96\)"),
        ("midlayer.hidden_norm.weight", None, "no tensor 'midlayer.hidden_norm.weight'"),
        ("d2t", None, "scores 200 of the target's 320 tokens, but has no 'd2t'"),
        ("d2t", good["d2t"][:100], "'d2t' maps 100 draft tokens, but the head scores 200"),
        ("d2t", good["d2t"] + 500, "'d2t' points at token .*; the target's vocabulary has 320"),
    ]
    for name, value, message in changes:
        tensors = {k: v for k, v in good.items() if k != name} | ({} if value is None else {name: value})
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            Eagle3Head(folder, target)


def test_no_head_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No EAGLE-3 head at"):
        read_aux_layers(tmp_path / "nothing", 4)
