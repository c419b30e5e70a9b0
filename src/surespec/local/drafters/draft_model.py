"""A smaller language model of the same vocabulary drafts, as in Leviathan et al. (arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from surespec.errors import ModelError
from surespec.local.drafters.cached import CachedDrafter, Guess
from surespec.local.types import IntArray, SeqChunk

if TYPE_CHECKING:
    from surespec.local.model import TargetModel
    from surespec.local.scheduler import Sequence


def check_vocabulary(draft: int, target: int) -> None:
    """Raises `ModelError` when the vocabularies (in tokens) differ in size."""
    if draft != target:
        raise ModelError(
            f"The draft model has a vocabulary of {draft} tokens and the target one of {target}; drafts can only be "
            "verified when they are the same.",
            hint="Take a draft model of the target's own family.",
        )


class DraftModelDrafter(CachedDrafter):
    """Drafts with ``model``, whose vocabulary must be the target's (``target_vocab`` tokens).

    ``max_len`` (tokens) is cut to the draft model's context. Raises `ModelError` when the vocabularies differ in size.
    """

    def __init__(
        self, model: TargetModel, target_vocab: int, *, max_num_seqs: int, max_len: int, probabilistic: bool = False
    ) -> None:
        check_vocabulary(model.config.vocab_size, target_vocab)
        max_len = min(max_len, model.config.max_position_embeddings)
        super().__init__(model.new_cache(max_num_seqs, max_len), max_len, probabilistic)
        self.model = model

    def first(self, batch: Seq[Sequence], starts: list[int], ids: list[IntArray], known: list[bool]) -> Guess:
        """One forward pass over the backlogs."""
        chunks = [SeqChunk(s.slot, at, i, len(i) - 1) for s, at, i in zip(batch, starts, ids, strict=True)]
        logits = self.model.forward(chunks, self.cache).logits
        return Guess(logits.argmax(axis=-1), logits)

    def following(self, batch: Seq[Sequence], starts: list[int], tokens: IntArray, before: Guess) -> Guess:
        """One forward pass over the newest drafts."""
        return self.first(batch, starts, [tokens[i : i + 1] for i in range(len(batch))], [])


__all__ = ["DraftModelDrafter", "check_vocabulary"]
