"""Mixtral's Hugging Face folders."""

import re
from collections.abc import Callable, Mapping

import numpy as np

from trellis import UserError
from trellis.hub import Family, Key
from trellis.models.llama.hub import KEYS, from_hub, to_hub
from trellis.models.mixtral.mixtral import MixtralConfig
from trellis.nn.moe import Routing

_EXPERT = "model.layers.{}.block_sparse_moe.experts.{}"
_KEYS = {path: key for path, key in KEYS.items() if ".mlp." not in path} | {
    "layers.block.mlp.router": Key("model.layers.{}.block_sparse_moe.gate.weight", "routes embed"),
    "layers.block.mlp.gate": Key(f"{_EXPERT}.w1.weight", "mlp embed"),
    "layers.block.mlp.up": Key(f"{_EXPERT}.w3.weight", "mlp embed"),
    "layers.block.mlp.down": Key(f"{_EXPERT}.w2.weight", "embed mlp"),
}


def _to_hub(config: MixtralConfig, positions: int) -> dict:
    if config.routing.bias_rate is not None or config.routing.capacity is not None:
        given = "bias_rate" if config.routing.bias_rate is not None else "capacity"
        raise UserError(
            "A Mixtral in a Hugging Face folder picks experts by their probabilities alone, and drops no token.",
            seen=f"{given}={getattr(config.routing, given)}",
            where=f"model.routing.{given}",
            fix="train with null",
        )
    return {
        **to_hub(config, positions),
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.routing.balance,
    }


def _from_hub(hub: Mapping) -> dict:
    return {
        **from_hub(hub),
        "experts": hub["num_local_experts"],
        "experts_per_token": hub["num_experts_per_tok"],
        "routing": Routing(balance=hub.get("router_aux_loss_coef", 0.001)),
    }


def _fused(text: str) -> tuple[str, Callable]:
    """Where `save_pretrained(save_original_format=False)` puts a tensor: all experts of a layer in one."""
    found = re.fullmatch(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w([123])\.weight", text)
    if found is None:
        return text.replace(".block_sparse_moe.gate.", ".mlp.gate."), lambda whole: whole
    lead, expert, which = found[1], int(found[2]), found[3]
    if which == "2":
        return f"{lead}.mlp.experts.down_proj", lambda whole: whole[expert]
    half = 0 if which == "1" else 1
    return f"{lead}.mlp.experts.gate_up_proj", lambda whole: np.split(whole[expert], 2)[half]


FAMILY = Family(
    config=MixtralConfig,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys=_KEYS,
    to_hub=_to_hub,
    from_hub=_from_hub,
    fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    elsewhere=_fused,
)
