"""What stands before and around every route: body limits, the API key, loopback-only routes, and error envelopes."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from surespec.errors import EngineError, SurespecError, UsageError
from surespec.local.openai_api import RequestError

log = logging.getLogger("surespec.server")

MAX_BODY_BYTES = 8 * 2**20
BODY_TIMEOUT_S = 30.0
RETRY_AFTER_S = 2
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def read_json_body(request: web.Request) -> bytes:
    """The body, of JSON type (which a web page of another site cannot send unasked), in reasonable time."""
    if request.content_type != "application/json":
        raise RequestError("The Content-Type must be application/json.", status=415)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(f"The request body did not arrive within {BODY_TIMEOUT_S:g} s.", status=408) from None


def only_local_programs(request: web.Request) -> None:
    """Let only programs of this machine through: no other host, no proxy, no web page. Raises RequestError (403)."""
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    from_here = isinstance(peer, tuple) and is_loopback(peer[0])
    relayed = any(name in request.headers for name in ("Forwarded", "X-Forwarded-For", "Origin", "Sec-Fetch-Site"))
    try:
        host = request.url.host or ""
    except ValueError:
        host = ""
    if not from_here or relayed or not (host == "localhost" or is_loopback(host)):
        raise RequestError(
            "This route is only for programs on the same machine, called by its loopback address.",
            status=403,
            kind="permission_error",
        )


def is_loopback(address: str) -> bool:
    """Whether an address (not a name) is this machine's own."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return bool((mapped or parsed).is_loopback)


def only_local_pages() -> Any:
    """Middleware for a server on the loopback interface: no web page of another site may use it through a browser.

    Such a page reaches 127.0.0.1 by a name that its owner points there (DNS rebinding), so that the browser takes the
    request for one to the page's own site; its ``Origin`` still names that site. Programs send none.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if origin is not None:
            try:
                host = urlsplit(origin).hostname or ""
            except ValueError:
                host = ""
            if not (host == "localhost" or is_loopback(host)):
                raise RequestError(
                    "Web pages of other sites may not use this server.", status=403, kind="permission_error"
                )
        return await handler(request)

    return check


def authorisation(api_key: str | None) -> Any:
    """Middleware that asks for the key on all routes that can read or cause model output."""
    expected = None if api_key is None else f"Bearer {api_key}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is not None and (request.path.startswith("/v1/") or request.path == "/tokenize"):
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                raise RequestError(
                    "The API key is missing or wrong.",
                    status=401,
                    kind="authentication_error",
                    code="invalid_api_key",
                )
        return await handler(request)

    return check


@web.middleware
async def error_envelopes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure leaves as OpenAI's error envelope; nothing of a request's content is logged."""
    try:
        return await handler(request)
    except ConnectionError:
        raise
    except Exception as error:
        refusal = as_request_error(error, request)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if refusal.status == 503 else None
    return web.json_response(refusal.body, status=refusal.status, headers=headers)


def as_request_error(error: Exception, request: web.Request) -> RequestError:
    """The refusal or failure that a client is told about ``error``. What nobody expected is logged by its type."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, UsageError):
        return RequestError(str(error))
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return RequestError(f"The request body is larger than {MAX_BODY_BYTES // 2**20} MiB.", status=413)
    if isinstance(error, web.HTTPException):
        return RequestError(f"{error.reason}: {request.method} {request.path}.", status=error.status)
    if isinstance(error, SurespecError):
        status = 503 if isinstance(error, EngineError) else 500
        return RequestError(str(error), status=status, kind="internal_server_error")
    log.error("%s %s failed with %s", request.method, request.path, type(error).__name__)
    log.debug("details", exc_info=error)
    return RequestError("The server failed on this request.", status=500, kind="internal_server_error")
