"""A small model of every family, as `transformers` and as Trellis describe it."""

import dataclasses

from trellis.models import (
    DeepseekV3Config,
    Gemma3Config,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    LinearScaling,
    Llama3Scaling,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    ModelConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Routing,
    YarnScaling,
)

VOCAB, POSITIONS = 61, 64
_GATED = dict(vocab=VOCAB, embed=32, layers=2, heads=4, kv_heads=2, mlp=48, rope_theta=1e4)
_LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16)
_YARN = YarnScaling(factor=4.0, original_context=16, truncate=False)

CONFIGS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**_GATED, head_dim=8, tie_embeddings=False),
    "llama3": LlamaConfig(**_GATED, head_dim=8, tie_embeddings=True, rope_scaling=_LLAMA3),
    "llama_linear": LlamaConfig(**_GATED, head_dim=8, tie_embeddings=False, rope_scaling=LinearScaling(factor=2.0)),
    "mistral": MistralConfig(**_GATED, head_dim=8, window=6, tie_embeddings=False),
    "qwen2": Qwen2Config(**_GATED, head_dim=8, tie_embeddings=True),
    "qwen3": Qwen3Config(**_GATED, head_dim=16, tie_embeddings=False),
    "olmo2": Olmo2Config(**_GATED, head_dim=8, tie_embeddings=False),
    "gemma3": Gemma3Config(
        **_GATED | {"layers": 5}, head_dim=8, window=6, global_every=2, query_scale=12,
        rope_scaling=LinearScaling(factor=8.0),
    ),
    "mixtral": MixtralConfig(
        **_GATED, head_dim=8, experts=4, experts_per_token=2, tie_embeddings=False, routing=Routing(balance=0.02)
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **_GATED, head_dim=16, experts=4, experts_per_token=2, tie_embeddings=False,
        routing=Routing(balance=0.02, normalize=False),
    ),
    "gpt_oss": GptOssConfig(
        **_GATED, head_dim=8, window=6, experts=4, experts_per_token=2, tie_embeddings=False,
        rope_scaling=_YARN, routing=Routing(balance=0.02),
    ),
    "deepseek_v3": DeepseekV3Config(
        vocab=VOCAB, embed=32, layers=3, dense_layers=1, heads=4, q_latent=24, kv_latent=16, nope_dim=8, rope_dim=4,
        value_dim=6, dense_mlp=64, mlp=24, shared_mlp=24, experts=8, experts_per_token=2, rope_theta=1e4,
        rope_scaling=dataclasses.replace(_YARN, truncate=True, mscale=0.8, mscale_all_dim=0.6), tie_embeddings=False,
        routing=Routing(scores="sigmoid", scale=2.5, groups=4, groups_per_token=2, bias_rate=0.001),
    ),
    "gpt2": GPT2Config(
        vocab=VOCAB, positions=POSITIONS, embed=32, layers=2, heads=4, mlp=64, norm_eps=1e-5, dropout=0.0,
        scale_by_inverse_layer=False, upcast_attention=False,
    ),
    "gpt2_mistral": GPT2Config(
        vocab=VOCAB, positions=POSITIONS, embed=32, layers=3, heads=4, mlp=64, norm_eps=1e-5, dropout=0.0,
        scale_by_inverse_layer=True, upcast_attention=True,
    ),
    "gptj": GPTJConfig(vocab=VOCAB, embed=32, layers=2, heads=2, rotary_dim=8, mlp=64, head_bias=True),
}  # fmt: skip
