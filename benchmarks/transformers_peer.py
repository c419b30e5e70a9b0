"""Runs inside a Python that has torch and transformers; called by engine.py, which sends the work as JSON on stdin.

In:  {"model": HF folder, "threads": n, "chat": [[token ids]], "copy": [[token ids]], "max_tokens": n, "lookup": k}
Out: one JSON line {"versions": {...}, "tok_s": {name: tokens per second of decoding}}

Decoding speed is (N - 1) tokens over the time that N tokens take longer than one: the prompt's own time drops out.
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    """Read the work, measure each way of generating, write the result."""
    import torch
    import transformers

    work = json.load(sys.stdin)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(work["threads"])
    torch.manual_seed(0)
    model = _load(work["model"])
    small = {"num_assistant_tokens": work["lookup"], "num_assistant_tokens_schedule": "constant"}
    helper = _load(work["model"])
    for name, value in small.items():
        setattr(helper.generation_config, name, value)
    lookup = {"prompt_lookup_num_tokens": work["lookup"]}
    count = work["max_tokens"]
    ways = {
        "plain, 1 stream, chat": (work["chat"], 1, {}),
        "plain, 8 streams, chat": (work["chat"], 8, {}),
        "plain, 1 stream, copy": (work["copy"], 1, {}),
        "prompt lookup, copy": (work["copy"], 1, lookup),
        "assisted (the model as its own draft), chat": (work["chat"][:2], 1, {"assistant_model": helper}),
    }
    speeds = {}
    for name, (prompts, batch, extra) in ways.items():
        speeds[name] = _speed(torch, model, prompts, batch, count, extra)
        print(f"transformers: {name}: {speeds[name]:.1f} tok/s", file=sys.stderr, flush=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions, "tok_s": speeds}))


def _load(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _speed(torch: Any, model: Any, prompts: list[list[int]], batch: int, count: int, extra: dict[str, Any]) -> float:
    """Tokens per second of decoding, all prompts together, after one that does not count."""

    def generate(ids: list[int], tokens: int) -> tuple[int, float]:
        given = torch.tensor([ids] * batch)
        options = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0, **extra}
        begin = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(given, attention_mask=torch.ones_like(given), **options)
        return batch * (out.shape[1] - len(ids)), time.perf_counter() - begin

    generate(prompts[0], 4)
    tokens, seconds = 0, 0.0
    for ids in prompts:
        first, short = generate(ids, 1)
        made, whole = generate(ids, count)
        tokens += made - first
        seconds += whole - short
    return tokens / seconds


if __name__ == "__main__":
    main()
