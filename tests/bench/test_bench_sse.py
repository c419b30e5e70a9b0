"""The event-stream parser: any split of a stream gives the same events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surespec.bench.sse import Event, EventParser


def parse(*pieces: bytes) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.close()


@pytest.mark.parametrize("eol", ["\n", "\r\n", "\r"])
def test_the_three_line_ends(eol: str) -> None:
    body = f": hello{eol}data: one{eol}{eol}{eol}event: error{eol}data: two{eol}data: three{eol}{eol}".encode()
    assert parse(body) == [Event("one"), Event("two\nthree", "error")]


def test_only_one_space_is_removed_and_colons_stay() -> None:
    assert parse(b"data:  a: b\n\ndata:c\n\ndata\n\n") == [Event(" a: b"), Event("c"), Event("")]


def test_bom_comments_ids_retries_and_unknown_fields_are_skipped() -> None:
    assert parse(b"\xef\xbb\xbf:keep-alive\n\nid: 4\nretry: 10\nfoo: bar\ndata: x\n\n") == [Event("x")]


def test_an_event_cut_off_by_the_end_is_delivered() -> None:
    assert parse(b"data: one\n\ndata: [DONE]") == [Event("one"), Event("[DONE]")]
    assert parse(b"data: one\n") == [Event("one")]


def test_an_event_with_a_name_but_no_data_is_dropped_and_its_name_forgotten() -> None:
    assert parse(b"event: ping\n\ndata: x\n\n") == [Event("x")]


def test_cr_ends_a_line_without_waiting_for_the_next_piece() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\r\r") == [Event("x")]
    assert parser.feed(b"\ndata: y\r\n\r") == [Event("y")]
    assert parser.feed(b"\n") == []
    assert parser.close() == []


def test_a_character_split_over_pieces_is_whole_and_bad_bytes_do_not_raise() -> None:
    euro = "data: €\n\n".encode()
    assert parse(euro[:7], euro[7:8], euro[8:]) == [Event("€")]
    assert parse(b"data: \xff\n\n") == [Event("\ufffd")]


_text = st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=12)


@given(
    st.lists(st.tuples(st.lists(_text, min_size=1, max_size=3), st.booleans()), max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(min_value=0, max_value=400), max_size=30),
    st.booleans(),
)
def test_any_split_gives_the_same_events(
    events: list[tuple[list[str], bool]], eol: str, cuts: list[int], bom: bool
) -> None:
    body = "\ufeff" if bom else ""
    for lines, named in events:
        body += f": comment é{eol}" + (f"event: note{eol}" if named else "")
        body += "".join(f"data: {line}{eol}" for line in lines) + eol
    raw = body.encode()
    places = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    pieces = [raw[a:b] for a, b in itertools.pairwise(places)]
    expected = [Event("\n".join(lines), "note" if named else "message") for lines, named in events]
    assert parse(*pieces) == expected
    assert parse(*(raw[i : i + 1] for i in range(len(raw)))) == expected
