"""Mistral 7B and what follows it to the letter: Llama's block, where a window of positions is seen if the config says.

Its GGUF files are Llama's.
"""

from serried.models.family import Family

MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    gguf_architectures=(),
    windows="all",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)
