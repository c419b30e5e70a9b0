vllm serve Qwen/Qwen3-8B \
  -sc.method eagle3 \
  -sc.model AngelSlim/Qwen3-8B_eagle3 \
  -sc.num_speculative_tokens 2 \
  --port 8000
