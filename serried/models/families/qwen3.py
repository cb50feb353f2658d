"""Qwen3, dense: Llama's block with QK-Norm."""

from serried.models.family import Family

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf_architectures=("qwen3",),
    qk_norm=True,
    refused=(("use_sliding_window", (False, None)),),
)
