docker run --gpus all -v ./models:/models -p 8080:8080 ghcr.io/ggml-org/llama.cpp:server-cuda \
  -m /models/qwen3-8b.gguf --port 8080 -md /models/qwen3-0.6b.gguf --draft-max 16 --draft-min 1
