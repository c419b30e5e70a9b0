docker run --rm --gpus all --network host nvcr.io/nvidia/vllm:26.05-py3 \
  bash -c "pip install -q arctic-inference==0.1.1 && vllm serve Qwen/Qwen3-8B --max-model-len 8192 --speculative-config '{\"method\":\"eagle3\",\"model\":\"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B\",\"num_speculative_tokens\":5,\"draft_tensor_parallel_size\":1}'"
