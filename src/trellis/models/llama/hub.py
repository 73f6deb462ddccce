"""Llama's Hugging Face folders."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from trellis import UserError
from trellis.hub import Family, Key
from trellis.models.llama.llama import LlamaConfig
from trellis.nn import LinearScaling, Llama3Scaling, Scaling, YarnScaling

KEYS = {
    "embedding": Key("model.embed_tokens.weight", "vocab embed"),
    "layers.block.attention_norm.scale": Key("model.layers.{}.input_layernorm.weight", "embed"),
    "layers.block.attention.q": Key("model.layers.{}.self_attn.q_proj.weight", "(heads head_dim) embed"),
    "layers.block.attention.k": Key("model.layers.{}.self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
    "layers.block.attention.v": Key("model.layers.{}.self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
    "layers.block.attention.out": Key("model.layers.{}.self_attn.o_proj.weight", "embed (heads head_dim)"),
    "layers.block.mlp_norm.scale": Key("model.layers.{}.post_attention_layernorm.weight", "embed"),
    "layers.block.mlp.gate": Key("model.layers.{}.mlp.gate_proj.weight", "mlp embed"),
    "layers.block.mlp.up": Key("model.layers.{}.mlp.up_proj.weight", "mlp embed"),
    "layers.block.mlp.down": Key("model.layers.{}.mlp.down_proj.weight", "embed mlp"),
    "norm.scale": Key("model.norm.weight", "embed"),
    "head": Key("lm_head.weight", "vocab embed"),
}


def to_hub(config, positions: int) -> dict:
    rope: dict = {"rope_type": "default"}
    match config.rope_scaling:
        case LinearScaling(factor=factor):
            rope = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling() as s:
            rope = {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_context,
            }
        case YarnScaling() as s:
            rope = {
                "rope_type": "yarn",
                "factor": s.factor,
                "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow,
                "truncate": s.truncate,
                "original_max_position_embeddings": s.original_context,
            }
            # Versions of transformers before 5 take the factor from these two lengths.
            positions = round(s.factor * s.original_context)
            if s.mscale_all_dim:
                rope |= {"mscale": s.mscale, "mscale_all_dim": s.mscale_all_dim}
            if not (s.mscale and s.mscale_all_dim):  # transformers takes a zero for a number that is not given
                rope["attention_factor"] = s.magnitude
    return {
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": config.norm_eps,
        # transformers 4 and 5 look in different places.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "tie_word_embeddings": config.tie_embeddings,
    }


def from_hub(hub: Mapping) -> dict:
    heads, rope = hub["num_attention_heads"], _rope(hub)
    _check_sees_all(hub)
    return {
        "vocab": hub["vocab_size"],
        "embed": hub["hidden_size"],
        "layers": hub["num_hidden_layers"],
        "heads": heads,
        "kv_heads": given(hub, "num_key_value_heads", lambda: heads),
        "head_dim": given(hub, "head_dim", lambda: hub["hidden_size"] // heads),
        "mlp": hub["intermediate_size"],
        "rope_theta": number("rope_theta", rope.get("rope_theta", hub.get("rope_theta", 10000.0))),
        "rope_scaling": _scaling(rope),
        "norm_eps": hub.get("rms_norm_eps", 1e-6),
        "tie_embeddings": hub.get("tie_word_embeddings", False),
    }


def given(hub: Mapping, name: str, default: Callable[[], int]) -> int:
    """A field's value, or what it is if it is left out or null. A zero is one, and no model has it."""
    value = hub.get(name)
    return default() if value is None else value


def number(name: str, value: object) -> float:
    """A number with a fraction, which a text is not, though Python makes one of it."""
    if type(value) not in (int, float):
        raise TypeError(f"{name}: {value!r}, which is no float")
    return float(value)


def _check_sees_all(hub: Mapping) -> None:
    """Refuses layers that attend to some of the earlier positions: by their kinds, or by a window, which the caches of
    transformers heed in every family, unless a field says that it has no use."""
    kinds = hub.get("layer_types") or ()
    windows = () if "use_sliding_window" in hub else ("sliding_window", "attention_chunk_size")
    seen = [f"{name}: {hub[name]}" for name in windows if hub.get(name) is not None]
    if other := sorted(set([kinds] if isinstance(kinds, str) else kinds) - {"full_attention"}):
        seen = [f"layer_types: {', '.join(other)}"]
    elif not kinds and hub.get("use_sliding_window") and hub.get("sliding_window") is not None:
        first, layers = hub.get("max_window_layers", 0), hub["num_hidden_layers"]
        seen = [f"use_sliding_window: True, max_window_layers: {first} of {layers}"] if first < layers else []
    if seen:
        raise UserError(
            "Every layer must attend to all earlier positions here.",
            seen=seen[0],
            where="config.json",
            fix="use a model whose layer_types are all full_attention, without a window",
        )


def _rope(hub: Mapping) -> dict:
    """How positions are rotated. transformers 4 and 5 look in different places, which may not differ."""
    older, newer = ({**(hub.get(place) or {})} for place in ("rope_scaling", "rope_parameters"))
    for rope in (older, newer):
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise TypeError("rotary positions of several kinds")
        if rope:
            rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    # Beside a rope_scaling nothing of rope_parameters holds.
    held = {"rope_theta": hub.get("rope_theta", 10000.0)} | older
    if older and (differing := [name for name, value in newer.items() if held.get(name) != value]):
        name = differing[0]
        place = "in" if name in older else "beside"
        raise UserError(
            "A config.json that has both rope_scaling and rope_parameters must say the same in both.",
            seen=f"{name}: {held.get(name)} {place} rope_scaling, {newer[name]} in rope_parameters",
            where="config.json",
            fix="remove the one that does not hold",
        )
    share = ({"partial_rotary_factor": hub.get("partial_rotary_factor")} | older | newer)["partial_rotary_factor"]
    if share not in (None, 1):
        raise UserError(
            "Rotary positions must rotate whole heads here.",
            seen=f"partial_rotary_factor: {share}",
            where="config.json",
            fix="use a model without partial_rotary_factor",
        )
    length = hub.get("original_max_position_embeddings")
    inner = (older | newer).get("original_max_position_embeddings", length)
    if length is not None and inner != length:
        raise UserError(
            "A config.json that has original_max_position_embeddings twice must have the same length in both.",
            seen=f"{inner} in {'rope_scaling' if older else 'rope_parameters'}, {length} beside it",
            where="config.json",
            fix="remove the one that does not hold",
        )
    length = length or hub.get("max_position_embeddings")
    return ({"original_max_position_embeddings": length} if length else {}) | older | newer


def _scaling(rope: Mapping) -> Scaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=rope["factor"])
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_context=rope["original_max_position_embeddings"],
        )
    if kind == "yarn":
        return _yarn(rope)
    raise UserError(
        "Rotary scaling must be of a known type.",
        seen=f"rope_type: {kind}",
        where="config.json",
        fix="use a model with the type default, linear, llama3 or yarn",
    )


def _yarn(rope: Mapping) -> YarnScaling:
    part = rope.get("mscale_all_dim") or 0.0
    both = part and rope.get("mscale")
    found = YarnScaling(
        factor=rope["factor"],
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        original_context=rope["original_max_position_embeddings"],
        truncate=rope.get("truncate", True),
        mscale=rope["mscale"] if both else 1.0,
        mscale_all_dim=part,
    )
    given = rope.get("attention_factor")
    if given is None:  # transformers divides by the part of the scores only if it finds both
        given = found.magnitude if both else found.growth(1.0)
    if math.isclose(given, found.magnitude, rel_tol=1e-6):
        return found
    if found.factor <= 1.0:
        raise UserError(
            "YaRN with a factor of 1 must leave queries and keys as they are.",
            seen=f"factor={found.factor}, attention_factor={given}",
            where="config.json",
            fix="use a model without attention_factor, or with a factor above 1",
        )
    # A magnitude other than the default determines the growth with the log of the factor.
    mscale = (given * found.growth(part) - 1.0) / (found.growth(1.0) - 1.0)
    return dataclasses.replace(found, mscale=mscale)


# What Llama and its descendants have in common.
GATED = {"hidden_act": "silu", "attention_bias": False}
DROPPED = {"attention_dropout": 0.0}

FAMILY = Family(
    config=LlamaConfig,
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=KEYS,
    to_hub=to_hub,
    from_hub=from_hub,
    fixed=GATED | {"mlp_bias": False},
    dropped=DROPPED,
)
