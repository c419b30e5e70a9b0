#!/usr/bin/env bash
# Llama 3.1 8B on the Thor, see the wiki
set -euo pipefail

docker run --rm -it --runtime nvidia --network host --ipc host \
  --name vllm \
  -v ~/.cache/huggingface:/root/.cache/huggingface \
  -e HF_TOKEN \
  vllm/vllm-openai:latest vllm serve nvidia/Llama-3.1-8B-Instruct-FP4 \
    --host 0.0.0.0 --port 8000 \
    --max-model-len 8192 \
    --gpu-memory-utilization 0.75 \
    --tensor-parallel-size 1
