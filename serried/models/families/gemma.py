"""Gemma 2 and 3: norms on both sides of attention and MLP, scaled embeddings, layers with a window in between.

Gemma 2 caps attention scores and logits; Gemma 3 normalizes q and k instead, and gives layers with a window a RoPE of
their own. Of the larger Gemma 3 models, which see images too, the decoder is run.
"""

from dataclasses import replace

from serried.models.family import Family, Names

_NAMES = Names(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
_GGUF_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_BOTH_WAYS = ("use_bidirectional_attention", (False, None))

GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    gguf_architectures=("gemma2",),
    norm_offset=1.0,
    scaled_embedding=True,
    attention_cap=True,
    logit_cap=True,
    tied=True,
    windows="pattern",
    pattern=2,
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    defaults={
        **_SIZES,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    names=_NAMES,
    refused=(_BOTH_WAYS,),
    gguf_names=_GGUF_NAMES,
    gguf_scales=(46,),  # 27B
)

GEMMA3 = replace(
    GEMMA2,
    name="gemma3",
    architectures=("Gemma3ForCausalLM",),
    gguf_architectures=("gemma3",),
    qk_norm=True,
    attention_cap=False,
    unused=("attn_logit_softcapping",),
    pattern=6,
    local_theta=10_000.0,
    defaults={**_SIZES, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1_000_000.0},
    gguf_scales=(62,),  # 27B
)

GEMMA3_IMAGES = replace(
    GEMMA3,
    name="gemma3 with images",
    architectures=("Gemma3ForConditionalGeneration",),
    gguf_architectures=(),
    nested="text_config",
    names=replace(
        _NAMES,
        embedding="language_model.model.embed_tokens",
        final_norm="language_model.model.norm",
        lm_head="language_model.lm_head",
        layer="language_model.model.layers.{i}",
    ),
    ignored=("vision_tower.", "multi_modal_projector."),
)
