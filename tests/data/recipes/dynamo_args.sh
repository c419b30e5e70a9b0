#!/bin/bash
set -e
MODEL="Qwen/Qwen3-8B"
EXTRA_ARGS=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --model)
            MODEL="$2"
            shift 2
            ;;
        -h|--help)
            echo "Usage: $0 [OPTIONS]"
            exit 0
            ;;
        *)
            EXTRA_ARGS+=("$1")
            shift
            ;;
    esac
done

source "$(dirname "$0")/common.sh"
GPU_MEM_ARGS=$(build_gpu_mem_args)

python3 -m dynamo.frontend --discovery-backend file &
python3 -m dynamo.vllm --model "$MODEL" --discovery-backend file \
    $GPU_MEM_ARGS "${EXTRA_ARGS[@]}" &
wait -n
