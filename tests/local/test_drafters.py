"""The drafters with a cache of their own, driven without an engine: catching up, moving, skipping, limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fake_target import FakeTarget
from surespec.errors import ModelError
from surespec.local.drafters.cached import BLOCK, CachedDrafter
from surespec.local.drafters.draft_model import DraftModelDrafter
from surespec.local.drafters.eagle3 import Eagle3Drafter
from surespec.local.eagle import Eagle3Head, read_aux_layers
from surespec.local.kv import KVCache
from surespec.local.model import TargetModel
from surespec.local.scheduler import Sequence
from surespec.local.types import SamplingParams, SeqChunk
from surespec.local.weights import load_model_files
from toy import make_eagle3_head, make_llama

VOCAB = 320


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = make_llama(tmp_path_factory.mktemp("target"), max_position_embeddings=2048, seed=3)
    return TargetModel(load_model_files(folder), aux_layers=(2, 2, 1), threads=1)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, target: TargetModel) -> Eagle3Head:
    folder = make_eagle3_head(tmp_path_factory.mktemp("head"), target.files.path)
    assert read_aux_layers(folder, 4) == (2, 2, 1)
    return Eagle3Head(folder, target)


class Bench:
    """A target and a drafter kept in step by hand, as the engine does it."""

    def __init__(self, target: TargetModel, drafter: CachedDrafter) -> None:
        self.target, self.drafter = target, drafter
        self.cache: KVCache = target.new_cache(8, 2048)
        self.running: list[Sequence] = []

    def add(self, prompt: list[int], **params: object) -> Sequence:
        """A new sequence in the next slot, its prompt not read."""
        made = SamplingParams(**params)  # type: ignore[arg-type]
        s = Sequence.create(len(self.running), prompt, made, len(prompt) + 1000, frozenset(), lambda _: None)
        s.slot = self.cache.alloc()
        self.running.append(s)
        self.drafter.start(s)
        return s

    def read(self, s: Sequence, tokens: list[int], drafts: list[int] | None = None, idle: bool = False) -> None:
        """The target reads what it has not (and ``drafts``, rejected); then ``tokens`` are known."""
        start, known = s.computed, s.ids[s.computed : s.length]
        ids = np.concatenate((known, np.array(drafts or [], np.int64)))
        out = self.target.forward([SeqChunk(s.slot, start, ids, len(ids))], self.cache)
        s.append(tokens)
        s.computed = start + len(known)
        self.drafter.observe(s, start, None if out.aux is None else out.aux[: len(known)], idle)

    def remove(self, s: Sequence) -> None:
        """Give the slot up; the last moves into it."""
        self.drafter.release(s)
        self.cache.free(s.slot)
        last = self.running.pop()
        if last is not s:
            self.running[s.slot] = last
            last.slot = s.slot


def make(kind: str, target: TargetModel, head: Eagle3Head, **extra: object) -> CachedDrafter:
    if kind == "eagle3":
        return Eagle3Drafter(head, VOCAB, max_num_seqs=8, max_len=2048, **extra)  # type: ignore[arg-type]
    return DraftModelDrafter(target, VOCAB, max_num_seqs=8, max_len=2048, **extra)  # type: ignore[arg-type]


def fresh(kind: str, target: TargetModel, head: Eagle3Head, ids: list[int], prompt_len: int, k: int) -> list[int]:
    """The draft of a drafter that reads the whole sequence at once: the reference."""
    bench = Bench(target, make(kind, target, head))
    s = bench.add(ids[:prompt_len])
    bench.read(s, ids[prompt_len : prompt_len + 1])
    for token in ids[prompt_len + 1 :]:
        bench.read(s, [token])
    return bench.drafter.propose([s], [k])[0].ids.tolist()


KINDS = ["draft_model", "eagle3"]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_do_not_depend_on_what_was_drafted_before(kind, target, head):
    """Rejected drafts, skipped steps and long backlogs leave no trace."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, VOCAB, size=90).tolist()
    bench = Bench(target, make(kind, target, head))
    s = bench.add(ids[:20])
    bench.read(s, [ids[20]])
    for i in range(21, 90):
        k = int(rng.integers(0, 6)) if not 40 < i < 70 else 0  # off for a while
        drafts = bench.drafter.propose([s], [k])[0].ids.tolist() if k else []
        assert len(drafts) == k
        if i % 7 == 0:
            assert not k or drafts == fresh(kind, target, head, ids[:i], 20, k)
        bench.read(s, [ids[i]], drafts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_is_read_in_blocks(kind, target, head):
    ids = np.random.default_rng(1).integers(3, VOCAB, size=3 * BLOCK).tolist()
    bench = Bench(target, make(kind, target, head))
    s = bench.add(ids[:-1])
    bench.read(s, ids[-1:])
    together = bench.drafter.propose([s], [4])[0].ids.tolist()
    assert together == fresh(kind, target, head, ids, 5, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_one_batch_do_not_disturb_each_other(kind, target, head):
    """Different k, k = 0 in between, a prompt that is not read yet in between, and slots that move."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(3, VOCAB, size=int(n)).tolist() for n in (30, 12, 50, 8, 25)]
    bench = Bench(target, make(kind, target, head))
    sequences = [bench.add(t[:5] if i != 3 else t) for i, t in enumerate(texts)]
    for i, (s, text) in enumerate(zip(sequences, texts, strict=True)):
        if i != 3:
            bench.read(s, [text[5]])
            for token in text[6:]:
                bench.read(s, [token])
    ks = [3, 0, 5, 0, 1]
    for token in (6, 7):  # the second time over the leftovers of the first
        drafts = bench.drafter.propose(sequences, ks)
        for s, text, draft, k in zip(sequences, texts, drafts, ks, strict=True):
            assert draft.ids.tolist() == (fresh(kind, target, head, text, 5, k) if k else [])
            if s.computed:
                bench.read(s, [token], draft.ids.tolist())
                text.append(token)
    bench.remove(sequences[0])
    assert [s.slot for s in bench.running] == [0, 1, 2, 3]
    bench.read(sequences[3], [7])
    texts[3].append(7)
    order = [4, 1, 2, 3]
    drafts = bench.drafter.propose([sequences[i] for i in order], [2] * 4)
    for i, draft in zip(order, drafts, strict=True):
        assert draft.ids.tolist() == fresh(kind, target, head, texts[i], 8 if i == 3 else 5, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_probabilistic_drafts_come_with_what_they_were_drawn_from(kind, target, head):
    ids = np.random.default_rng(3).integers(3, VOCAB, size=20).tolist()
    bench = Bench(target, make(kind, target, head, probabilistic=True))
    warm, cold = bench.add(ids[:5], temperature=1.0, seed=1), bench.add(ids[:5])
    for s in (warm, cold):
        bench.read(s, [ids[5]])
    hot, greedy = bench.drafter.propose([warm, cold], [3, 3])
    assert hot.probs is not None
    assert hot.probs.shape == (3, VOCAB)
    assert np.allclose(hot.probs.sum(axis=1), 1)
    assert (hot.probs[np.arange(3), hot.ids] > 0).all()
    assert greedy.probs is None
    assert greedy.ids.tolist() == fresh(kind, target, head, ids[:6], 5, 3)
    if kind == "eagle3":
        assert ((hot.probs > 0).sum(axis=1) == head.draft_vocab).all()


def test_the_heads_states_never_pile_up(target, head):
    """While speculation is off they are read a block at a time."""
    drafter = make("eagle3", target, head)
    bench = Bench(target, drafter)
    s = bench.add([5] * 10)
    for token in np.random.default_rng(4).integers(3, VOCAB, size=2 * BLOCK).tolist():
        bench.read(s, [token])
        assert s.computed - drafter.valid[0] <= BLOCK + 1
    assert drafter.valid[0] > BLOCK


def test_while_nothing_is_drafted_the_head_reads_nothing_and_keeps_little(target, head, monkeypatch):
    ids = np.random.default_rng(6).integers(3, VOCAB, size=BLOCK + 60).tolist()
    drafter = make("eagle3", target, head)
    bench = Bench(target, drafter)
    long, short = bench.add(ids[:20]), bench.add(ids[:20])
    with monkeypatch.context() as quiet:
        quiet.setattr(drafter, "first", None)  # any work would fail
        for i in range(20, BLOCK + 60):
            bench.read(long, [ids[i]], idle=True)
            if i < 100:
                bench.read(short, [ids[i]], idle=True)
    assert drafter._aux[long.slot] is None and not drafter.can_draft(long), "too much to catch up on"
    assert drafter.can_draft(short)
    assert drafter.propose([short], [4])[0].ids.tolist() == fresh("eagle3", target, head, ids[:100], 20, 4)
    bench.read(long, [5])
    assert not drafter.can_draft(long), "what is missing stays missing"
    bench.remove(long)
    assert drafter.can_draft(short), "which moved into its slot"
    assert drafter.can_draft(bench.add([1, 2]))


def test_a_draft_model_of_another_vocabulary_is_refused():
    with pytest.raises(ModelError, match="vocabulary of 60 tokens and the target one of 50"):
        DraftModelDrafter(FakeTarget(60), 50, max_num_seqs=1, max_len=10)  # type: ignore[arg-type]


def test_the_drafters_context_is_the_shorter_one(target: TargetModel):
    assert DraftModelDrafter(FakeTarget(max_len=64), 50, max_num_seqs=1, max_len=500).max_len == 64  # type: ignore[arg-type]


def test_a_head_needs_a_target_with_states(head, target):
    drafter = make("eagle3", target, head)
    with pytest.raises(ValueError, match="auxiliary states"):
        drafter.observe(Bench(target, drafter).add([1, 2]), 0, None, False)


def test_a_head_for_another_hidden_size_is_refused(tmp_path: Path, target: TargetModel):
    folder = make_eagle3_head(tmp_path / "head", target.files.path, hidden_size=48)
    with pytest.raises(ModelError, match=r"hidden size 48.*32"):
        Eagle3Head(folder, target)
