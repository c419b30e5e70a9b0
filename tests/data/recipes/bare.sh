CUDA_VISIBLE_DEVICES=0 nohup vllm serve Qwen/Qwen3-8B --port 8001 --max_model_len 16k > vllm.log 2>&1 &
