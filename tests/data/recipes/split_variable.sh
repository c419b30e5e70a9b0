#!/bin/sh
VLLM_ARGS="--max-model-len 8192 --gpu-memory-utilization 0.85"
VLLM_ARGS="$VLLM_ARGS --enable-prefix-caching"
exec vllm serve Qwen/Qwen3-8B $VLLM_ARGS
