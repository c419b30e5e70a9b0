"""The embedded server under load for long: does it stay right, and does it give everything back?

    python benchmarks/soak.py --minutes 60 [--concurrency 16] [--model smollm2-135m]

A real ``surespec serve`` (n-gram drafting by default) is used by as many clients as ``--concurrency``, each sending, by
chance, greedy requests whose answer is known, sampled ones with a seed, streams that are cut off in the middle, several
choices, stop texts, and malformed ones; meanwhile k is changed every few seconds. Afterwards:

* every greedy answer equals the reference, made beforehand by the same model without speculation;
* malformed requests were refused with a 4xx, nothing was answered with a 500;
* no request runs or waits any more, and the KV cache is empty;
* memory is flat: between the second quarter of the time and its end it grows by at most 3 % and 30 MB together;
* open files and threads are at the end what they were after warming up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

DRAFTING = '{"method":"ngram","num_speculative_tokens":5}'
SAMPLE_S, CHANGE_K_S = 1.0, 3.0
PROMPTS = tuple(
    f"{opening} {subject}" + f" {tail}" * repeats
    for opening in ("Tell me about", "Repeat after me:", "Write a list of")
    for subject, tail, repeats in (
        ("rivers", "and the sea", 0),
        ("the red fox", "and the red fox", 6),
        ("old trains", "one two three four", 20),
    )
)
MALFORMED = (
    b"{", b"[]",  b'{"model":"soak"}',
    b'{"model":"other","prompt":"x"}', b'{"model":"soak","prompt":"x","max_tokens":-1}',
    b'{"model":"soak","prompt":"x","temperature":"hot"}', b'{"model":"soak","prompt":[99999999]}', b"\xff\xfe\x00",
    b'{"model":"soak","prompt":"x","n":100000}', b'{"model":"soak","prompt":' + b"[" * 2000 + b"]" * 2000 + b"}",
)  # fmt: skip


@dataclass
class Seen:
    """What happened, and what it cost."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


class Server:
    """A ``surespec serve`` of its own."""

    def __init__(self, model: str, *extra: str) -> None:
        command = [sys.executable, "-m", "surespec", "serve", "--model", model, "--served-model-name", "soak",
                   "--port", "0", "--max-model-len", "512", *extra]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if found := re.search(r"serving soak on (http://\S+)", line):
                self.url = found[1]
                return
        raise SystemExit(f"the server did not start: {said}")

    def stop(self) -> None:
        """End it; a server that does not end in time is killed and said."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SystemExit("the server did not end within 20 s of SIGTERM") from None


def main() -> int:
    """Print what was found; exit code 1 when a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculative-config", default=DRAFTING)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    problems, seen = soak(chosen.model, chosen.minutes * 60, chosen.concurrency, chosen.speculative_config, chosen.seed)
    print(f"{chosen.minutes:g} minutes, {chosen.concurrency} clients: {sum(seen.counts.values())} requests")
    for what, count in sorted(seen.counts.items()):
        print(f"  {what:<24} {count}")
    marks = [seen.rss_mb[round(share * (len(seen.rss_mb) - 1))] for share in (0, 0.25, 0.5, 0.75, 1)]
    print(f"  memory (MB) at 0, 25, 50, 75, 100 % of the time: {', '.join(f'{m:.0f}' for m in marks)}")
    print(f"  open files {seen.files[0]} -> {seen.files[-1]}, threads {seen.threads[0]} -> {seen.threads[-1]}")
    for problem in problems:
        print(f"FAILS: {problem}")
    if not problems:
        print("holds: 0 wrong answers, no leaked slot, flat memory, files and threads")
    return 1 if problems else 0


def soak(model: str, seconds: float, concurrency: int, speculative: str, seed: int) -> tuple[list[str], Seen]:
    """Run it. Returns what does not hold, and what was seen."""
    plain = Server(model)
    try:
        references = asyncio.run(references_of(plain.url))
    finally:
        plain.stop()
    server = Server(model, "--speculative-config", speculative)
    try:
        seen = asyncio.run(load(server, references, seconds, concurrency, seed))
        problems = asyncio.run(leaks(server.url))
        if server.process.poll() is not None:
            problems.append(f"the server ended by itself with {server.process.returncode}")
    finally:
        server.stop()
    return [*problems, *findings(seen)], seen


def greedy(prompt: str) -> dict[str, Any]:
    """A request whose answer is known."""
    return {"model": "soak", "prompt": prompt, "max_tokens": 24, "temperature": 0}


async def references_of(url: str) -> dict[str, str]:
    """The greedy answers without speculation, one at a time."""
    async with aiohttp.ClientSession(url) as session:
        return {prompt: (await complete(session, greedy(prompt)))[1]["choices"][0]["text"] for prompt in PROMPTS}


async def complete(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and document of a completion."""
    async with session.post("/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


async def load(server: Server, references: dict[str, str], seconds: float, concurrency: int, seed: int) -> Seen:
    """All clients at once until the time is up; the server is looked at every second."""
    seen, end = Seen(), time.monotonic() + seconds
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as session:
        clients = [client(session, references, seen, end, random.Random(seed * 1000 + i)) for i in range(concurrency)]
        watching = asyncio.create_task(watch(server, seen, end))
        changing = asyncio.create_task(change_k(session, seen, end, random.Random(seed)))
        await asyncio.gather(*clients, changing, watching)
    await asyncio.sleep(1.0)  # connections close
    note(server, seen)
    return seen


async def watch(server: Server, seen: Seen, end: float) -> None:
    """Memory, files and threads over time, from when the server is warm."""
    await asyncio.sleep(min(2.0, max(0.0, end - time.monotonic())))
    while time.monotonic() < end:
        note(server, seen)
        await asyncio.sleep(SAMPLE_S)


def note(server: Server, seen: Seen) -> None:
    """One look at the process."""
    process = psutil.Process(server.process.pid)
    seen.rss_mb.append(process.memory_info().rss / 2**20)
    seen.files.append(process.num_fds())
    seen.threads.append(process.num_threads())


async def change_k(session: aiohttp.ClientSession, seen: Seen, end: float, chance: random.Random) -> None:
    """Another k every few seconds, 0 among them."""
    while time.monotonic() < end:
        async with session.post(
            "/surespec/speculation", json={"num_speculative_tokens": chance.randint(0, 5)}
        ) as answer:
            seen.counts["changes of k" if answer.status == 200 else f"change of k: {answer.status}"] += 1
        await asyncio.sleep(min(CHANGE_K_S, max(0.0, end - time.monotonic())))


async def client(
    session: aiohttp.ClientSession, references: dict[str, str], seen: Seen, end: float, chance: random.Random
) -> None:
    """One client: a request after the other, of a kind by chance."""
    kinds = (known_answer, known_answer, sampled, cut_off, cut_off, several, stopped, malformed)
    while time.monotonic() < end:
        kind = chance.choice(kinds)
        try:
            await kind(session, references, seen, chance)
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            seen.wrong.append(f"{kind.__name__}: {type(error).__name__} {error}")


async def known_answer(session: Any, references: dict[str, str], seen: Seen, chance: random.Random) -> None:
    """Greedy, as one answer or as a stream."""
    prompt = chance.choice(PROMPTS)
    if chance.random() < 0.5:
        status, document = await complete(session, greedy(prompt))
        text = document["choices"][0]["text"] if status == 200 else f"status {status}"
    else:
        text = "".join([piece async for piece in streamed(session, greedy(prompt))])
    seen.counts["greedy, compared"] += 1
    if text != references[prompt]:
        seen.wrong.append(f"greedy: {text!r} instead of {references[prompt]!r}")


async def streamed(session: Any, body: dict[str, Any]) -> Any:
    """The texts of a stream."""
    async with session.post("/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.content:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                document = json.loads(data)
                if "choices" not in document:
                    raise ValueError(f"{answer.status} {data[:200]}")
                for choice in document["choices"]:
                    yield choice["text"]


async def sampled(session: Any, references: dict[str, str], seen: Seen, chance: random.Random) -> None:
    """With a temperature and a seed."""
    body = {**greedy(chance.choice(PROMPTS)), "temperature": 0.8, "seed": chance.randrange(1000), "top_p": 0.9}
    await expect_200("sampled", session, body, seen)


async def several(session: Any, references: dict[str, str], seen: Seen, chance: random.Random) -> None:
    """Several choices at once."""
    await expect_200("several choices", session, {**greedy(chance.choice(PROMPTS)), "n": 3, "temperature": 1.0}, seen)


async def stopped(session: Any, references: dict[str, str], seen: Seen, chance: random.Random) -> None:
    """A stop text that occurs in the known answer: what comes before it is known too."""
    prompt = chance.choice(PROMPTS)
    known = references[prompt]
    stop = known[len(known) // 2 : len(known) // 2 + 2]
    status, document = await complete(session, {**greedy(prompt), **({"stop": [stop]} if stop.strip() else {})})
    seen.counts["stop texts, compared"] += 1
    wanted = known[: known.index(stop)] if stop.strip() else known
    if status != 200 or document["choices"][0]["text"] != wanted:
        seen.wrong.append(f"stop {stop!r}: {document} instead of {wanted!r}")


async def cut_off(session: Any, references: dict[str, str], seen: Seen, chance: random.Random) -> None:
    """Hang up after some pieces of a long stream."""
    pieces = chance.randrange(4)
    async for _ in streamed(session, {**greedy(chance.choice(PROMPTS)), "max_tokens": 150}):
        pieces -= 1
        if pieces < 0:
            break
    seen.counts["cut off"] += 1


async def malformed(session: Any, references: dict[str, str], seen: Seen, chance: random.Random) -> None:
    """A request that must be refused."""
    headers = {"Content-Type": "application/json"}
    async with session.post("/v1/completions", data=chance.choice(MALFORMED), headers=headers) as answer:
        seen.counts["malformed"] += 1
        if not 400 <= answer.status < 500:
            seen.wrong.append(f"malformed: {answer.status} {await answer.text()}")


async def expect_200(what: str, session: Any, body: dict[str, Any], seen: Seen) -> None:
    """A request whose answer is not known but must come."""
    status, document = await complete(session, body)
    seen.counts[what] += 1
    if status != 200 or len(document["choices"]) != body.get("n", 1):
        seen.wrong.append(f"{what}: {status} {document}")


async def leaks(url: str) -> list[str]:
    """What the server still holds once nobody asks anything."""
    async with aiohttp.ClientSession(url) as session:
        for _ in range(100):
            async with session.get("/metrics") as answer:
                page = await answer.text()
            held = {name: float(re.search(rf"^vllm:{name}\{{.*\}} (\S+)", page, re.MULTILINE)[1])
                    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}  # fmt: skip
            if not any(held.values()):
                return []
            await asyncio.sleep(0.1)
    return [f"leaked: {name} is {value:g} with no request" for name, value in held.items() if value]


def findings(seen: Seen) -> list[str]:
    """What was seen beside what was promised."""
    out = [f"wrong answer: {text[:300]}" for text in seen.wrong[:5]]
    if len(seen.wrong) > 5:
        out.append(f"{len(seen.wrong)} wrong answers in all")
    quarter = len(seen.rss_mb) // 4
    if quarter >= 5:
        before, after = (
            statistics.median(part) for part in (seen.rss_mb[quarter : 2 * quarter], seen.rss_mb[-quarter:])
        )
        if after > before * 1.03 + 30:
            out.append(f"memory grows: {before:.0f} MB in the second quarter, {after:.0f} MB in the last")
    if seen.files[-1] > seen.files[0] + 8:
        out.append(f"open files grow: {seen.files[0]} -> {seen.files[-1]}")
    if seen.threads[-1] > seen.threads[0] + 8:
        out.append(f"threads grow: {seen.threads[0]} -> {seen.threads[-1]}")
    return out


if __name__ == "__main__":
    sys.exit(main())
