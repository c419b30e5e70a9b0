"""JSON from outside: nesting without end, endless numbers and half characters are bad JSON, not a fault later on."""

from __future__ import annotations

import json
import re
from typing import Any

_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def loads_json(text: str | bytes | bytearray, *, keep_halves: bool = False, **options: Any) -> Any:
    """As `json.loads`, but everything that is wrong with the text is a ValueError.

    So is half of a surrogate pair, which nothing can write or send, unless ``keep_halves``: the caller names the field.
    """
    try:
        value = json.loads(text, **options)
        if not keep_halves:
            refuse_halves(text if isinstance(text, str) else text.decode("utf-8", "replace"), value)
        return value
    except json.JSONDecodeError:
        raise
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is no text") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError("it holds a number of too many digits" if "digits" in str(error) else str(error)) from None


def refuse_halves(text: str, value: Any) -> None:
    """Raise UnicodeEncodeError when ``value``, read from ``text``, holds a string that is no text."""
    if _HALF.search(text) or not text.isascii():
        json.dumps(value, ensure_ascii=False).encode()


def dumps_json(document: Any) -> str:
    """A document for people and programs. Half a surrogate pair (a file name that is not UTF-8) stays as its escape."""
    text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


__all__ = ["dumps_json", "loads_json", "refuse_halves"]
