"""Qwen3's Hugging Face folders."""

from trellis.hub import Family, Key
from trellis.models.llama.hub import DROPPED, GATED, from_hub
from trellis.models.llama.hub import KEYS as _LLAMA
from trellis.models.qwen2.hub import DEFAULTS, to_hub
from trellis.models.qwen3.qwen3 import Qwen3Config

KEYS = _LLAMA | {
    "layers.block.attention.q_norm.scale": Key("model.layers.{}.self_attn.q_norm.weight", "head_dim"),
    "layers.block.attention.k_norm.scale": Key("model.layers.{}.self_attn.k_norm.weight", "head_dim"),
}

FAMILY = Family(
    config=Qwen3Config,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=KEYS,
    to_hub=to_hub,
    from_hub=from_hub,
    fixed=GATED,
    dropped=DROPPED,
    defaults={**DEFAULTS, "head_dim": 128},
)
