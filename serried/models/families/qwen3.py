"""Qwen3, dense: Llama's block with QK-Norm."""

from serried.models.family import Family

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    qk_norm=True,
    windows="upper",
    defaults={"max_window_layers": 28, "sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
)
