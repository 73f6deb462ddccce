"""Hugging Face folders of Qwen3's mixtures of experts."""

import re
from collections.abc import Callable, Mapping

import numpy as np

from trellis.hub import Family, Key
from trellis.models.llama.hub import DROPPED, GATED, from_hub, to_hub
from trellis.models.mixtral.hub import balance, picked, refuse_others
from trellis.models.qwen3.hub import KEYS
from trellis.models.qwen3_moe.qwen3_moe import Qwen3MoeConfig
from trellis.nn.moe import Routing

_EXPERT = "model.layers.{}.mlp.experts.{}"
_KEYS = {path: key for path, key in KEYS.items() if ".mlp." not in path} | {
    "layers.block.mlp.router": Key("model.layers.{}.mlp.gate.weight", "routes embed"),
    "layers.block.mlp.gate": Key(f"{_EXPERT}.gate_proj.weight", "mlp embed"),
    "layers.block.mlp.up": Key(f"{_EXPERT}.up_proj.weight", "mlp embed"),
    "layers.block.mlp.down": Key(f"{_EXPERT}.down_proj.weight", "embed mlp"),
}


def _to_hub(config: Qwen3MoeConfig, positions: int) -> dict:
    refuse_others(config, "Qwen3 mixture", allowed=("normalize",))
    return {
        **to_hub(config, positions),
        "intermediate_size": config.mlp,  # for layers without experts; there are none
        "moe_intermediate_size": config.mlp,
        "num_experts": config.experts,
        "norm_topk_prob": config.routing.normalize,
        **picked(config),
    }


def _from_hub(hub: Mapping) -> dict:
    return {
        **from_hub(hub),
        "mlp": hub["moe_intermediate_size"],
        "experts": hub["num_experts" if "num_experts" in hub else "num_local_experts"],  # in newer versions
        "experts_per_token": hub["num_experts_per_tok"],
        "routing": Routing(balance=balance(hub), normalize=hub.get("norm_topk_prob", False)),
    }


def fused(text: str) -> tuple[str, Callable]:
    """Where `save_pretrained(save_original_format=False)` puts a tensor: it joins all experts of a layer."""
    found = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", text)
    if found is None:
        return text, lambda whole: whole
    lead, expert, which = found[1], int(found[2]), found[3]
    if which == "down":
        return f"{lead}.down_proj", lambda whole: whole[expert]
    half = 0 if which == "gate" else 1
    return f"{lead}.gate_up_proj", lambda whole: np.split(whole[expert], 2)[half]


FAMILY = Family(
    config=Qwen3MoeConfig,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=_KEYS,
    to_hub=_to_hub,
    from_hub=_from_hub,
    fixed=GATED | {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    dropped=DROPPED,
    defaults={"num_key_value_heads": 4},
    elsewhere=fused,
)
