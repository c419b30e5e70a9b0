"""Is the output still the target's own? Greedy texts of a candidate against the baseline's, prompt by prompt. Pure.

Equal bytes are the wrong gate: kernels round differently for another batch width, and near a tie the greedy choice
flips. So the baseline is compared with itself first (launch against launch, and concurrency 1 against the others);
that is its noise floor. A candidate is at fault when clearly more prompts differ from the baseline than the baseline
differs from itself: a one-sided exact test (Fisher) at ``FAULT_LEVEL``.

Where the baseline was asked again with logprobs (``bench/gaps.py``), the gap between its two best tokens at the place
of the divergence decides instead: no rounding turns a choice that is clearer than ``TIE_NATS``, so a single such
divergence is a fault; and where every divergence is a near tie, there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from scipy.stats import fisher_exact

from surespec.core import Launch, Noun
from surespec.rules import load_topic

FAULT_LEVEL = 0.02
TIE_NATS = 0.5
"""A gap between the two best tokens that rounding may still turn. bf16 logits of size 20 are 0.06 to 0.13 apart."""


class Divergence(Noun):
    """Where a candidate's text leaves the baseline's: ``position`` counts characters from the start. ``gap_nats`` is
    how clear the baseline's choice was there; None where it was not asked."""

    prompt_id: str
    concurrency: int
    position: int
    gap_nats: float | None = None

    @property
    def is_fault(self) -> bool:
        """Whether no rounding explains it."""
        return self.gap_nats is not None and self.gap_nats > TIE_NATS


class LosslessReport(Noun):
    """``lossless``: True (same, or within the baseline's own noise), False (a fault), None (cannot be told).

    ``compared`` counts prompts over all concurrencies; ``differing`` those that differ from the baseline, and
    ``baseline_differing`` those in which the baseline differs from itself.
    """

    lossless: bool | None
    detail: str
    compared: int = 0
    differing: int = 0
    baseline_differing: int = 0
    divergences: tuple[Divergence, ...] = ()


def lossy_settings(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What in a speculative config (vLLM's keys) or among an engine's flags is lossy by design, a sentence each
    (``rules/lossy.toml``)."""
    said = []
    for entry in load_topic("lossy")["setting"]:
        value = settings.get(entry["key"])
        if value is None:
            continue
        if ("is" in entry and value not in entry["is"]) or ("below" in entry and not _below(value, entry["below"])):
            continue
        said.append(f"{entry['key']} {value} is lossy by design: {entry['what']}.")
    return tuple(said)


def _below(value: object, limit: float) -> bool:
    try:
        return float(str(value)) < limit
    except ValueError:
        return False


def first_divergence(a: str, b: str) -> int | None:
    """Index of the first character that differs; the shorter length if one text starts the other; None if equal."""
    if a == b:
        return None
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def compare_texts(
    baseline: Sequence[Launch], candidate: Sequence[Launch], *, temperature: float = 0.0
) -> LosslessReport:
    """Compare the texts of all ok launches at every concurrency that both arms measured.

    Needs greedy decoding (``temperature`` 0) and texts in the traces; otherwise ``lossless`` is None and says why.
    """
    if temperature > 0:
        return LosslessReport(lossless=None, detail=f"Not compared: texts are sampled (temperature {temperature:g}).")
    base, cand = _texts(baseline), _texts(candidate)
    widths = sorted({c for c, _ in base} & {c for c, _ in cand})
    if not widths:
        return LosslessReport(lossless=None, detail="Not compared: there are no texts of both arms.")
    noise = _noise(base)
    gaps = {(g.prompt_id, g.position): g.nats for launch in baseline for g in launch.gaps}
    rows = [_at(width, base, cand, noise, gaps) for width in widths]
    divergences = tuple(d for row in rows for d in row[1])
    compared, differing = sum(row[0] for row in rows), len(divergences)
    noisy = sum(row[2] for row in rows) if noise is not None else 0
    verdict = _decide(rows, known=noise is not None)
    return LosslessReport(
        lossless=verdict,
        detail=_detail(verdict, compared, differing, noisy, divergences, known=noise is not None),
        compared=compared,
        differing=differing,
        baseline_differing=noisy,
        divergences=divergences,
    )


TextsOfRun = dict[str, str]
Key = tuple[int, int]  # concurrency, launch index
Row = tuple[int, list[Divergence], int]  # prompts compared, divergences, prompts in which the baseline differs itself


def _texts(launches: Iterable[Launch]) -> dict[Key, TextsOfRun]:
    """Texts of every run by prompt. A prompt that was sent twice in a run counts once, by its first answer."""
    found: dict[Key, TextsOfRun] = {}
    for launch in launches:
        if launch.status != "ok":
            continue
        for run in launch.runs:
            texts: TextsOfRun = {}
            for trace in run.traces:
                if trace.ok and trace.text:
                    texts.setdefault(trace.prompt_id, trace.text)
            if texts:
                found[run.concurrency, launch.index] = texts
    return found


def _noise(base: dict[Key, TextsOfRun]) -> set[str] | None:
    """Prompts in which any two runs of the baseline differ; None with a single run, which has no noise floor."""
    if len(base) < 2:
        return None
    return {
        prompt_id
        for a, b in combinations(base.values(), 2)
        for prompt_id in a.keys() & b.keys()
        if a[prompt_id] != b[prompt_id]
    }


def _at(
    width: int,
    base: dict[Key, TextsOfRun],
    cand: dict[Key, TextsOfRun],
    noise: set[str] | None,
    gaps: Mapping[tuple[str, int], float],
) -> Row:
    """One concurrency: a prompt differs when any launch of the candidate leaves the text of the first baseline."""
    reference = base[min(key for key in base if key[0] == width)]
    answers = [texts for key, texts in sorted(cand.items()) if key[0] == width]
    shared = sorted(prompt_id for prompt_id in reference if any(prompt_id in texts for texts in answers))
    divergences = []
    for prompt_id in shared:
        places = [
            place
            for texts in answers
            if prompt_id in texts and (place := first_divergence(reference[prompt_id], texts[prompt_id])) is not None
        ]
        if places:
            clear = [gaps[prompt_id, place] for place in places if (prompt_id, place) in gaps]
            divergences.append(
                Divergence(
                    prompt_id=prompt_id, concurrency=width, position=min(places), gap_nats=max(clear, default=None)
                )
            )
    return len(shared), divergences, len((noise or set()) & set(shared))


def _decide(rows: Sequence[Row], *, known: bool) -> bool | None:
    """False if one concurrency shows a fault; True if nothing differs or no more than the noise; else None."""
    found = [divergence for _, divergences, _ in rows for divergence in divergences]
    if any(divergence.is_fault for divergence in found):
        return False
    if all(divergence.gap_nats is not None for divergence in found):
        return True  # nothing differs, or only where the baseline's own choice was a near tie
    if not known:
        return None
    for compared, divergences, noisy in rows:
        table = [[len(divergences), compared - len(divergences)], [noisy, compared - noisy]]
        if float(fisher_exact(table, alternative="greater")[1]) < FAULT_LEVEL:
            return False
    return True if all(len(divergences) <= noisy for _, divergences, noisy in rows) else None


def _detail(
    verdict: bool | None, compared: int, differing: int, noisy: int, divergences: Sequence[Divergence], *, known: bool
) -> str:
    """One sentence for the report."""
    if differing == 0:
        return f"All {compared} greedy texts are the same as the baseline's."
    first = min(divergences, key=lambda d: d.position)
    where = f"first after {first.position} characters of prompt {first.prompt_id}"
    counts = f"{differing} of {compared} greedy texts differ from the baseline's ({where})"
    if fault := next((d for d in divergences if d.is_fault), None):
        return (
            f"{counts}; in prompt {fault.prompt_id} the baseline's choice was clear (its best token is "
            f"{fault.gap_nats:.1f} nats ahead of the second), so this is no rounding."
        )
    if verdict is True and all(d.gap_nats is not None for d in divergences):
        return f"{counts}, each where the baseline's own choice was a near tie: rounding, not speculation."
    if not known:
        return f"{counts}; there is no second baseline run that would show how much it differs from itself."
    own = f"the baseline differs from itself in {noisy}"
    if verdict is False:
        return f"{counts}, while {own}: more than rounding explains."
    if verdict is None:
        return f"{counts}, while {own}: too few to tell a fault from rounding."
    return f"{counts}, and {own}: no more than its own noise."
