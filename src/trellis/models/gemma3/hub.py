"""Gemma 3's Hugging Face folders, of models that read text alone."""

from collections.abc import Mapping

from trellis import UserError
from trellis.hub import Family, Key
from trellis.models.gemma3.gemma3 import Gemma3Config
from trellis.models.llama.hub import DROPPED, from_hub, number, to_hub
from trellis.models.llama.hub import KEYS as _LLAMA
from trellis.models.qwen3.hub import KEYS as _QWEN3

_NEAR, _FAR = "sliding_attention", "full_attention"
_NORMS = {
    "before_attention": "input_layernorm",
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
_BLOCK = {
    path.removeprefix("layers.block."): key
    for path, key in _QWEN3.items()
    if path.startswith(("layers.block.attention.", "layers.block.mlp."))
} | {f"{name}.scale": Key(f"model.layers.{{}}.{theirs}.weight", "embed") for name, theirs in _NORMS.items()}


def _keys(config: Gemma3Config) -> dict[str, Key]:
    return {
        **{path: key for path, key in _LLAMA.items() if ".block." not in path},
        **{f"first_layers.block.{path}": key for path, key in _BLOCK.items()},
        **{
            f"layers.block.blocks.{i}.{path}": key._replace(first=config.first + i, step=config.period)
            for i in range(config.period)
            for path, key in _BLOCK.items()
        },
    }


def _to_hub(config: Gemma3Config, positions: int) -> dict:
    whole = to_hub(config, positions)
    near = {"rope_theta": config.local_rope_theta, "rope_type": "default"}
    return {
        **whole,
        # transformers 4 and 5 look in different places.
        "rope_local_base_freq": config.local_rope_theta,
        "rope_parameters": {_NEAR: near, _FAR: whole["rope_parameters"]},
        "sliding_window": config.window,
        "sliding_window_pattern": config.global_every or config.layers + 1,
        "layer_types": [_FAR if window is None else _NEAR for window in config.windows],
        "query_pre_attn_scalar": config.query_scale,
        "pad_token_id": None,  # else 0, whose row of the table transformers would not train
    }


def _from_hub(hub: Mapping) -> dict:
    layers, ropes = hub["num_hidden_layers"], {**(hub.get("rope_parameters") or {})}
    kinds = hub.get("layer_types") or _kinds(layers, hub.get("sliding_window_pattern", 6))
    every = kinds.index(_FAR) + 1 if _FAR in kinds else None
    if kinds != _kinds(layers, every or layers + 1):
        raise UserError(
            "If a layer of a Gemma 3 sees everything, so must every so many layers one more.",
            seen=f"layer_types: {', '.join(kinds)}",
            where="config.json",
            fix="use a model whose layers repeat",
        )
    near, far = ({**(ropes.get(kind) or {})} for kind in (_NEAR, _FAR))
    if (kind := near.get("rope_type", "default")) != "default":
        raise UserError(
            "The layers of a Gemma 3 that see a window must have positions that are not scaled.",
            seen=f"rope_type: {kind} of {_NEAR}",
            where="config.json",
            fix="use a model that scales positions in the other layers alone",
        )
    # The length before scaling is among the parameters of a kind of layers, or the model's.
    left = dict.fromkeys(("layer_types", "sliding_window", "original_max_position_embeddings"))
    theta = far.get("rope_theta", hub["rope_theta"])
    shared = from_hub({**hub, **left, "rope_theta": theta, "rope_parameters": far})
    return {
        **shared,
        "window": hub["sliding_window"],
        "global_every": every,
        "query_scale": hub["query_pre_attn_scalar"],
        "local_rope_theta": number("rope_theta", near.get("rope_theta", hub.get("rope_local_base_freq", 10_000.0))),
    }


def _kinds(layers: int, every: int) -> list[str]:
    return [_FAR if (i + 1) % every == 0 else _NEAR for i in range(layers)]


FAMILY = Family(
    config=Gemma3Config,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=_keys,
    to_hub=_to_hub,
    from_hub=_from_hub,
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    dropped=DROPPED,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
)
