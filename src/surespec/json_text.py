"""JSON from outside: nesting without end is bad JSON, not an end of the stack."""

from __future__ import annotations

import json
from typing import Any


def loads_json(text: str | bytes | bytearray, **options: Any) -> Any:
    """As `json.loads`, but everything that is wrong with the text is a ValueError."""
    try:
        return json.loads(text, **options)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError("it holds a number of too many digits" if "digits" in str(error) else str(error)) from None


def dumps_json(document: Any) -> str:
    """A document for people and programs. Half a surrogate pair (a file name that is not UTF-8) stays as its escape."""
    text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


__all__ = ["dumps_json", "loads_json"]
