"""An incremental reader of server-sent events: bytes in, events out, no I/O.

Rules are those of the WHATWG HTML standard, section 9.2.6 "Interpreting an event stream": a line ends with CRLF, LF or
CR; a line that starts with a colon is a comment; an empty line ends an event; the values of several ``data`` lines of
one event are joined by line feeds; one byte order mark at the very start is skipped.
Two departures, both for servers as they are: an event cut off by the end of the stream is still delivered by ``close``
(some servers leave out the last empty line), and bytes that are not UTF-8 become U+FFFD instead of an error.
"""

from __future__ import annotations

from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``name`` is ``message`` unless the server named it."""

    data: str
    name: str = "message"


class EventParser:
    """Feed it the body of a stream in pieces of any size; each call returns the events completed by that piece.

    Lines are split as bytes and decoded whole, so a UTF-8 character that arrives in two pieces is never broken.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._at_start = True
        self._skip_lf = False
        self._data: list[str] = []
        self._name = ""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that ``piece`` completes, in order."""
        if self._skip_lf and piece:
            piece, self._skip_lf = piece.removeprefix(b"\n"), False
        self._tail += piece
        if self._at_start:
            if len(self._tail) < len(_BOM) and _BOM.startswith(self._tail):
                return []
            self._tail = self._tail.removeprefix(_BOM)
            self._at_start = False
        events: list[Event] = []
        for line in self._complete_lines():
            event = self._take(line)
            if event is not None:
                events.append(event)
        return events

    def close(self) -> list[Event]:
        """The event left open when the stream ended, if there is one."""
        rest, self._tail = self._tail, b""
        if self._at_start:
            rest = rest.removeprefix(_BOM)
        events = [event] if rest and (event := self._take(rest)) else []
        last = self._take(b"")
        return events if last is None else [*events, last]

    def _complete_lines(self) -> list[bytes]:
        """Cut all finished lines off the tail. A CR at the very end ends its line now; an LF after it is skipped."""
        buffer = self._tail
        if b"\n" not in buffer and b"\r" not in buffer:
            return []
        self._skip_lf = buffer.endswith(b"\r")
        lines = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._tail = lines.pop()
        return lines

    def _take(self, line: bytes) -> Event | None:
        """Account for one line; an empty one ends the event and returns it when it carried data."""
        if not line:
            event = Event("\n".join(self._data), self._name or "message") if self._data else None
            self._data, self._name = [], ""
            return event
        field, _, value = line.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None
