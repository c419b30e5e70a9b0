python3 -u -m vllm.entrypoints.openai.api_server \
    --model meta-llama/Llama-3.1-8B-Instruct \
    --speculative_model [ngram] --num_speculative_tokens 5 \
    --ngram_prompt_lookup_max 4 \
    --gpu_memory_utilization 0.9 \
    --disable-log-requests
