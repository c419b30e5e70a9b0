#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
set -e
trap 'echo Cleaning up...; kill 0' EXIT

# run ingress
python -m dynamo.frontend --http-port=8000 &

# run worker
DYN_SYSTEM_PORT=8081 \
CUDA_VISIBLE_DEVICES=0 python3 -m dynamo.vllm \
    --model "meta-llama/Meta-Llama-3.1-8B-Instruct" --enforce-eager \
    --speculative_config '{
        "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "draft_tensor_parallel_size": 1,
        "num_speculative_tokens": 5,
        "method": "eagle3"
    }' \
    --gpu-memory-utilization 0.8
