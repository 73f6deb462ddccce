"""OLMo 2's Hugging Face folders."""

from trellis.hub import Family, Key
from trellis.models.llama.hub import DROPPED, GATED, from_hub, to_hub
from trellis.models.llama.hub import KEYS as _LLAMA
from trellis.models.olmo2.olmo2 import Olmo2Config

KEYS = _LLAMA | {
    "layers.block.attention.q_norm.scale": Key("model.layers.{}.self_attn.q_norm.weight", "(heads head_dim)"),
    "layers.block.attention.k_norm.scale": Key("model.layers.{}.self_attn.k_norm.weight", "(kv_heads head_dim)"),
    "layers.block.attention_norm.scale": Key("model.layers.{}.post_attention_layernorm.weight", "embed"),
    "layers.block.mlp_norm.scale": Key("model.layers.{}.post_feedforward_layernorm.weight", "embed"),
}


def _to_hub(config: Olmo2Config, positions: int) -> dict:
    # What is left out would be token 1 to transformers, which trains no row of the table that stands for padding.
    return {**to_hub(config, positions), "pad_token_id": None}


FAMILY = Family(
    config=Olmo2Config,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=KEYS,
    to_hub=_to_hub,
    from_hub=from_hub,
    fixed=GATED,
    dropped=DROPPED,
    defaults={"rms_norm_eps": 1e-5},
)
