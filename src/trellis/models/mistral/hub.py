"""Mistral's Hugging Face folders."""

from collections.abc import Mapping

from trellis import UserError
from trellis.hub import Family
from trellis.models.llama.hub import DROPPED, KEYS, from_hub, to_hub
from trellis.models.mistral.mistral import MistralConfig


def _to_hub(config: MistralConfig, positions: int) -> dict:
    return {**to_hub(config, positions), "sliding_window": config.window}


def _from_hub(hub: Mapping) -> dict:
    window = hub.get("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = hub.get("layer_types") or [kind]
    if other := sorted(set([kinds] if isinstance(kinds, str) else kinds) - {kind}):
        raise UserError(
            "The layers of a Mistral must all see its window, or all keys if it has none.",
            seen=f"layer_types: {', '.join(other)}; sliding_window: {window}",
            where="config.json",
            fix=f"use a model whose layer_types are all {kind}, or without them",
        )
    return {**from_hub({**hub, "sliding_window": None, "layer_types": None}), "window": window}


FAMILY = Family(
    config=MistralConfig,
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=KEYS,
    to_hub=_to_hub,
    from_hub=_from_hub,
    fixed={"hidden_act": "silu"},
    dropped=DROPPED,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
