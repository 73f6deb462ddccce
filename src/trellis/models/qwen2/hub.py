"""Qwen2's Hugging Face folders."""

from trellis.hub import Family, Key
from trellis.models.llama.hub import DROPPED, from_hub, to_hub
from trellis.models.llama.hub import KEYS as _LLAMA
from trellis.models.qwen2.qwen2 import Qwen2Config

KEYS = _LLAMA | {
    "layers.block.attention.q_bias": Key("model.layers.{}.self_attn.q_proj.bias", "(heads head_dim)"),
    "layers.block.attention.k_bias": Key("model.layers.{}.self_attn.k_proj.bias", "(kv_heads head_dim)"),
    "layers.block.attention.v_bias": Key("model.layers.{}.self_attn.v_proj.bias", "(kv_heads head_dim)"),
}

FAMILY = Family(
    config=Qwen2Config,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=KEYS,
    to_hub=to_hub,
    from_hub=from_hub,
    fixed={"hidden_act": "silu", "use_sliding_window": False},
    dropped=DROPPED,
)
