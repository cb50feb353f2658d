"""Llama 2 and 3, and what follows it to the letter (SmolLM2)."""

from serried.models.family import Family

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
)
