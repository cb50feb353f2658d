"""Phi-3, 3.5 and 4 (mini): Llama's block; q, k and v lie in one tensor of the file, and so do gate and up."""

from serried.models.family import Family, Names

PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    gguf_architectures=("phi3",),
    partial_rotary=True,
    windows="all",
    rope_kinds={"su": "longrope", "yarn": "longrope"},  # what longrope was called at first
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    names=Names(qkv_proj="self_attn.qkv_proj", gate_up_proj="mlp.gate_up_proj"),
    gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)
