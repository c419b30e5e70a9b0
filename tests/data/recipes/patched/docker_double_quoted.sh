DRAFT=${DRAFT:-yuhuili/EAGLE3-LLaMA3.1-Instruct-8B}
docker run -d --gpus all -p 9000:8000 --entrypoint vllm vllm/vllm-openai:v0.27.1 serve Qwen/Qwen3-8B \
  --speculative-config "{\"method\": \"eagle3\", \"model\": \"$DRAFT\", \"num_speculative_tokens\": ${K:-5}, \"draft_tensor_parallel_size\": 1}" \
  --gpu-memory-utilization=0.80
