"""Qwen2's Hugging Face folders."""

from collections.abc import Mapping
from typing import Any

from trellis.hub import Family, Key
from trellis.models.llama.hub import DROPPED, from_hub
from trellis.models.llama.hub import KEYS as _LLAMA
from trellis.models.llama.hub import to_hub as _to_hub
from trellis.models.qwen2.qwen2 import Qwen2Config

KEYS = _LLAMA | {
    "layers.block.attention.q_bias": Key("model.layers.{}.self_attn.q_proj.bias", "(heads head_dim)"),
    "layers.block.attention.k_bias": Key("model.layers.{}.self_attn.k_proj.bias", "(kv_heads head_dim)"),
    "layers.block.attention.v_bias": Key("model.layers.{}.self_attn.v_proj.bias", "(kv_heads head_dim)"),
}
# Layers from `max_window_layers` on see a window, if `use_sliding_window` says so.
DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


def to_hub(config, positions: int) -> dict:
    return {**_to_hub(config, positions), "use_sliding_window": False}


FAMILY = Family(
    config=Qwen2Config,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=KEYS,
    to_hub=to_hub,
    from_hub=from_hub,
    fixed={"hidden_act": "silu"},
    dropped=DROPPED,
    defaults=DEFAULTS,
)
