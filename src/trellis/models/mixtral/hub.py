"""Mixtral's Hugging Face folders."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping

import numpy as np

from trellis import UserError
from trellis.hub import Family, Key
from trellis.models.llama.hub import DROPPED, KEYS, from_hub, to_hub
from trellis.models.mixtral.mixtral import MixtralConfig
from trellis.nn.moe import Routing

_EXPERT = "model.layers.{}.block_sparse_moe.experts.{}"
_KEYS = {path: key for path, key in KEYS.items() if ".mlp." not in path} | {
    "layers.block.mlp.router": Key("model.layers.{}.block_sparse_moe.gate.weight", "routes embed"),
    "layers.block.mlp.gate": Key(f"{_EXPERT}.w1.weight", "mlp embed"),
    "layers.block.mlp.up": Key(f"{_EXPERT}.w3.weight", "mlp embed"),
    "layers.block.mlp.down": Key(f"{_EXPERT}.w2.weight", "embed mlp"),
}


def refuse_others(config, kind: str, *, allowed: Collection[str] = ()) -> None:
    """Refuses a mixture of experts that a folder cannot describe.

    Args:
        config: of the model.
        kind: what the folder is of, for the message.
        allowed: fields of the routing that this folder can describe.

    Raises:
        UserError: naming the first field that differs from what such folders have.
    """
    plain = Routing()
    routing = ("scores", "normalize", "scale", "groups", "groups_per_token", "bias_rate", "capacity")
    own = {f"routing.{name}": (getattr(config.routing, name), getattr(plain, name)) for name in routing}
    theirs = {"shared_mlp": None, "expert_biases": False}
    own |= {f.name: (getattr(config, f.name), theirs[f.name]) for f in dataclasses.fields(config) if f.name in theirs}
    for name, (value, theirs) in own.items():
        if value != theirs and name.removeprefix("routing.") not in allowed:
            raise UserError(
                f"A {kind} in a Hugging Face folder must pick experts by their probabilities alone, drop no token, "
                "and have nothing beside its experts.",
                seen=f"{name}={value}",
                where=f"model.{name}",
                fix=f"train with {'null' if theirs is None else str(theirs).lower()}",
            )


def picked(config) -> dict:
    """How many experts a token has, and the weight of the load-balancing loss. That of `transformers` sums the shares
    of a token's first expert, of its second and so on: with an even load it is their number, where ours is 1."""
    count = config.experts_per_token
    return {"num_experts_per_tok": count, "router_aux_loss_coef": config.routing.balance / count}


def balance(hub: Mapping) -> float:
    """The weight of our load-balancing loss."""
    return hub.get("router_aux_loss_coef", 0.001) * hub["num_experts_per_tok"]


def _to_hub(config: MixtralConfig, positions: int) -> dict:
    refuse_others(config, "Mixtral")
    return {**to_hub(config, positions), "num_local_experts": config.experts, **picked(config)}


def _from_hub(hub: Mapping) -> dict:
    return {
        **from_hub(hub),
        "experts": hub["num_local_experts"],
        "experts_per_token": hub["num_experts_per_tok"],
        "routing": Routing(balance=balance(hub)),
    }


def _fused(text: str) -> tuple[str, Callable]:
    """Where `save_pretrained(save_original_format=False)` puts a tensor: it joins all experts of a layer."""
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
    dropped=DROPPED,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    elsewhere=_fused,
)
