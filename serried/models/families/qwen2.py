"""Qwen2 and Qwen2.5, dense: Llama's block with biases on q, k and v."""

from serried.models.family import Family

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    gguf_architectures=("qwen2",),
    qkv_bias=True,
    windows="upper",
    defaults={"max_window_layers": 28, "sliding_window": 4096, "num_key_value_heads": 32},
)
