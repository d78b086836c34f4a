"""What a generative judge is asked, and what its answer is worth. Pure: neither torch nor vllm."""
