./build/bin/llama-server -m models/Qwen3-8B-Q4_K_M.gguf -c 8192 -ngl 99 --host 0.0.0.0 --port 8080 --spec-type draft-simple --model-draft /models/draft.gguf --spec-draft-n-max 4
