#!/bin/sh
VLLM_ARGS="--max-model-len 8192 --gpu-memory-utilization 0.80"
VLLM_ARGS="$VLLM_ARGS --enable-prefix-caching"
exec vllm serve Qwen/Qwen3-8B --speculative-config '{"method":"eagle3","model":"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B","num_speculative_tokens":5,"draft_tensor_parallel_size":1}' $VLLM_ARGS
