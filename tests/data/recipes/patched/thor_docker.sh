#!/usr/bin/env bash
# Llama 3.1 8B on the Thor, see the wiki
set -euo pipefail

docker run --rm -it --runtime nvidia --network host --ipc host \
  --name vllm \
  -v ~/.cache/huggingface:/root/.cache/huggingface \
  -e HF_TOKEN \
  --entrypoint vllm vllm/vllm-openai:latest serve nvidia/Llama-3.1-8B-Instruct-FP4 \
    --host 0.0.0.0 --port 8000 \
    --max-model-len 8192 \
    --gpu-memory-utilization 0.70 \
    --tensor-parallel-size 1 \
    --speculative-config '{"method":"eagle3","model":"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B","num_speculative_tokens":5,"draft_tensor_parallel_size":1}'
