"""``acme-serve`` of docs/adding-an-engine.md: an OpenAI-compatible server whose speed is a matter of sleeping.

Plain: one token a step. With ``--draft K``: every draft is accepted, so a step gives K + 1 tokens for hardly more time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from aiohttp import web

STEP_S, DRAFTED_S = 0.012, 0.0005
TEXT = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", ""]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--draft", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.model == "broken":
        print("acme: error: the weights of 'broken' are damaged", file=sys.stderr)
        sys.exit(3)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": chosen.model, "object": "model"}]})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def chat(request: web.Request) -> web.StreamResponse:
        ask = await request.json()
        want = int(ask.get("max_tokens") or ask.get("max_completion_tokens") or 16)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(**body: object) -> None:
            whole = {"id": "a", "object": "chat.completion.chunk", "created": 0, "model": chosen.model, **body}
            await response.write(f"data: {json.dumps(whole)}\n\n".encode())

        done = 0
        while done < want:
            await asyncio.sleep(STEP_S + DRAFTED_S * chosen.draft)
            count = min(chosen.draft + 1, want - done)
            text = " ".join(TEXT[(done + i) % 10] for i in range(count)) + " "
            done += count
            await say(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])
        await say(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        await say(choices=[], usage={"prompt_tokens": 8, "completion_tokens": done, "total_tokens": done + 8})
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", chat)
    web.run_app(app, host="127.0.0.1", port=chosen.port, print=None)


if __name__ == "__main__":
    main()
