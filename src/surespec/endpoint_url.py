"""The URL of a server as people give it, as it is printed, and a small question to it."""

from __future__ import annotations

import base64
import os
import re
import urllib.error
import urllib.request

from yarl import URL

from surespec.errors import UsageError

_EXAMPLE = "Example: http://localhost:8000"
_CREDENTIALS = re.compile(r"(?<=//)[^/\s]*@|[?#].*", re.DOTALL)
KEY_VARIABLES = ("SURESPEC_API_KEY", "OPENAI_API_KEY")


def api_key() -> str:
    """The key sent to servers: the first of ``KEY_VARIABLES`` that is set, or an empty text."""
    return next((key for name in KEY_VARIABLES if (key := os.environ.get(name, ""))), "")


def normalise_endpoint(endpoint: str) -> URL:
    """The server's root as a URL: scheme added where missing, a trailing ``/v1`` and slashes removed.

    Raises:
        UsageError: what was given is no HTTP URL.
    """
    text = endpoint.strip()
    given = repr(_CREDENTIALS.sub("", text))
    try:
        url = URL(text if "://" in text else f"http://{text}")
        port_ok = url.port is not None
    except ValueError as err:
        raise UsageError(f"--endpoint {given} is not a URL: {err}.", hint=_EXAMPLE) from err
    if url.scheme not in ("http", "https") or not url.host or not port_ok:
        raise UsageError(f"--endpoint {given} is not an HTTP URL.", hint=_EXAMPLE)
    path = url.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return url.with_path(path or "/").with_query(None).with_fragment(None)


def shown(url: URL) -> str:
    """The URL without user name and password, as it may be printed."""
    return str(url.with_user(None)).rstrip("/")


def get_text(root: URL, path: str, timeout_s: float, max_bytes: int) -> str:
    """The body of a GET below ``root``, with the API key or the URL's own user and password.

    Raises OSError (``urllib.error.HTTPError`` for a status of 400 and more) when there is none.
    """
    try:
        request = urllib.request.Request(f"{shown(root)}/{path}")
        if root.user is not None:
            pair = base64.b64encode(f"{root.user}:{root.password or ''}".encode()).decode()
            request.add_header("Authorization", f"Basic {pair}")
        elif key := api_key():
            request.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bytes(answer.read(max_bytes)).decode("utf-8", errors="replace")
    except ValueError as error:
        raise OSError(str(error)) from error
