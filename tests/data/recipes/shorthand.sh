vllm serve Qwen/Qwen3-8B --spec-method eagle3 --spec-model AngelSlim/Qwen3-8B_eagle3 --spec-tokens 2 -tp 2
