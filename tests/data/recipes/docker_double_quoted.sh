DRAFT=${DRAFT:-RedHatAI/Qwen3-8B-speculator.eagle3}
docker run -d --gpus all -p 9000:8000 --entrypoint vllm vllm/vllm-openai:v0.27.1 serve Qwen/Qwen3-8B \
  --speculative-config "{\"method\": \"eagle3\", \"model\": \"$DRAFT\", \"num_speculative_tokens\": ${K:-3}}" \
  --gpu-memory-utilization=0.80
