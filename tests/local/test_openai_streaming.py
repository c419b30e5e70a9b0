"""Stop strings over pieces of text, and steps of several tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from surespec.local.streaming import ChoiceDecoder, StopScanner
from surespec.local.types import StepOutput, TokenLogprob


class Letters:
    """A detokenizer for tests: token id = code point; one letter is kept back as if it were half a character."""

    def __init__(self, late: bool = False) -> None:
        self.late, self.held = late, ""

    def push(self, ids: Sequence[int]) -> str:
        text = self.held + "".join(map(chr, ids))
        self.held = text[-1:] if self.late else ""
        return text[:-1] if self.late else text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def scan(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    text = "".join(scanner.push(piece) for piece in pieces)
    return text + scanner.flush(), scanner.matched


def test_a_stop_string_over_pieces_is_cut_with_all_that_follows() -> None:
    assert scan(["END"], ["abcE", "N", "Dxyz", "more"]) == ("abc", "END")


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["END", "NOW"])
    assert scanner.push("abcEN") == "abc"
    assert scanner.push("O") == "E"  # "NO" may still become "NOW"
    assert scanner.push("x") == "NOx"


def test_the_stop_string_that_begins_first_wins() -> None:
    assert scan(["cd", "bcde"], ["abcdef"]) == ("a", "bcde")


def test_text_held_back_comes_out_at_the_end() -> None:
    assert scan(["END"], ["abcEN"]) == ("abcEN", None)


@given(st.text("abE", max_size=30), st.lists(st.text("abE", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_pieces_never_change_what_comes_out(text: str, stops: list[str], data: st.DataObject) -> None:
    """However the text is cut: all of it comes out, or all of it before a stop string that really is there."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, matched = scan(stops, pieces)
    if matched is None:
        assert found == text and not any(stop in text for stop in stops)
    else:
        assert text.startswith(found + matched)
        assert not any(stop in found for stop in stops)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    decoder = ChoiceDecoder(Letters(), ["lo"])
    first = decoder.push(StepOutput(ids("hel")))
    assert (first.text, first.finish_reason) == ("he", None)
    logprobs = tuple(TokenLogprob(i, -1.0) for i in ids("o wor"))
    last = decoder.push(StepOutput(ids("o wor"), logprobs))
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == ("", ids("o"), "stop", "lo")
    assert last.logprobs == logprobs[:1]


@given(st.text("abc", min_size=1, max_size=20), st.lists(st.text("abc", min_size=1, max_size=3), max_size=2), st.data())
def test_speculation_never_changes_text_or_count(text: str, stops: list[str], data: st.DataObject) -> None:
    """Steps of several tokens give what steps of one token give."""

    def run(pieces: Sequence[str]) -> tuple[str, int, str | None]:
        decoder, out, count = ChoiceDecoder(Letters(late=True), stops), "", 0
        for number, piece in enumerate(pieces):
            delta = decoder.push(StepOutput(ids(piece), None, "length" if number == len(pieces) - 1 else None))
            out, count = out + delta.text, count + len(delta.token_ids)
            if delta.finish_reason:
                return out, count, delta.stop_reason
        raise AssertionError("the last step has a finish reason")

    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1)))) if len(text) > 1 else []
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(pieces) == run(list(text))


def test_a_stop_string_in_the_flushed_rest_counts() -> None:
    delta = ChoiceDecoder(Letters(late=True), ["b"]).push(StepOutput(ids("ab"), None, "length"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "b")
