#!/bin/bash
MODEL="${1:-Qwen/Qwen3-8B-AWQ}"
PORT=${PORT:-8000}
GPU_UTIL=${GPU_UTIL:-0.80}   # leave some for the desktop
IMAGE=ghcr.io/nvidia-ai-iot/vllm:latest-jetson-orin

ARGS=(
  --host 0.0.0.0
  --port "$PORT"
  --max-model-len 8192        # 16k does not fit
  --gpu-memory-utilization "$GPU_UTIL"
  --speculative-config '{"method":"eagle3","model":"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B","num_speculative_tokens":5,"draft_tensor_parallel_size":1}'
)
if [ -n "${SERVED_NAME:-}" ]; then
  ARGS+=(--served-model-name "$SERVED_NAME")
fi

echo "starting $MODEL with util $GPU_UTIL"
exec docker run --rm --runtime nvidia --network host --name vllm \
  -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
  "$IMAGE" vllm serve "$MODEL" "${ARGS[@]}" "$@"
