"""The families of models as Hugging Face has them: their configurations, and where each parameter is."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trellis.errors import UserError
from trellis.models import (
    GPT2Config,
    GPTJConfig,
    LinearScaling,
    Llama3Scaling,
    LlamaConfig,
    MixtralConfig,
    ModelConfig,
    Qwen3Config,
    Routing,
)

from .keys import Key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    Attributes:
        config: our configuration's class.
        model_type: what `config.json` calls it.
        architecture: the class in `transformers`.
        keys: where each parameter is, by its path in the model.
        to_hub: the fields of `config.json`, from a configuration and the longest sequence.
        from_hub: our fields, from those of `config.json`.
        fixed: fields of `config.json` that must have these values, since our model has no others.
        zeros: tensors that a folder has in any case: zeros where our model has no such parameter.
        elsewhere: from a tensor's key to another key, and what to take of that tensor, for folders that hold it there.
    """

    config: type
    model_type: str
    architecture: str
    keys: Mapping[str, Key]
    to_hub: Callable[[Any, int], dict]
    from_hub: Callable[[Mapping], dict]
    fixed: Mapping[str, Any]
    zeros: Sequence[Key] = ()
    elsewhere: Callable[[str], tuple[str, Callable]] | None = None


_LLAMA_KEYS = {
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
_QWEN3_KEYS = _LLAMA_KEYS | {
    "layers.block.attention.q_norm.scale": Key("model.layers.{}.self_attn.q_norm.weight", "head_dim"),
    "layers.block.attention.k_norm.scale": Key("model.layers.{}.self_attn.k_norm.weight", "head_dim"),
}
_EXPERT = "model.layers.{}.block_sparse_moe.experts.{}"
_MIXTRAL_KEYS = {path: key for path, key in _LLAMA_KEYS.items() if ".mlp." not in path} | {
    "layers.block.mlp.router": Key("model.layers.{}.block_sparse_moe.gate.weight", "routes embed"),
    "layers.block.mlp.gate": Key(f"{_EXPERT}.w1.weight", "mlp embed"),
    "layers.block.mlp.up": Key(f"{_EXPERT}.w3.weight", "mlp embed"),
    "layers.block.mlp.down": Key(f"{_EXPERT}.w2.weight", "embed mlp"),
}
_GPT2_KEYS = {
    "embedding": Key("transformer.wte.weight", "vocab embed"),
    "positions": Key("transformer.wpe.weight", "positions embed"),
    "layers.block.attention_norm.scale": Key("transformer.h.{}.ln_1.weight", "embed"),
    "layers.block.attention_norm.bias": Key("transformer.h.{}.ln_1.bias", "embed"),
    "layers.block.attention.qkv": Key("transformer.h.{}.attn.c_attn.weight", "embed (qkv heads head_dim)"),
    "layers.block.attention.qkv_bias": Key("transformer.h.{}.attn.c_attn.bias", "(qkv heads head_dim)"),
    "layers.block.attention.out": Key("transformer.h.{}.attn.c_proj.weight", "(heads head_dim) embed"),
    "layers.block.attention.out_bias": Key("transformer.h.{}.attn.c_proj.bias", "embed"),
    "layers.block.mlp_norm.scale": Key("transformer.h.{}.ln_2.weight", "embed"),
    "layers.block.mlp_norm.bias": Key("transformer.h.{}.ln_2.bias", "embed"),
    "layers.block.mlp.up": Key("transformer.h.{}.mlp.c_fc.weight", "embed mlp"),
    "layers.block.mlp.up_bias": Key("transformer.h.{}.mlp.c_fc.bias", "mlp"),
    "layers.block.mlp.down": Key("transformer.h.{}.mlp.c_proj.weight", "mlp embed"),
    "layers.block.mlp.down_bias": Key("transformer.h.{}.mlp.c_proj.bias", "embed"),
    "norm.scale": Key("transformer.ln_f.weight", "embed"),
    "norm.bias": Key("transformer.ln_f.bias", "embed"),
}
_GPTJ_KEYS = {
    "embedding": Key("transformer.wte.weight", "vocab embed"),
    "layers.block.norm.scale": Key("transformer.h.{}.ln_1.weight", "embed"),
    "layers.block.norm.bias": Key("transformer.h.{}.ln_1.bias", "embed"),
    "layers.block.attention.q": Key("transformer.h.{}.attn.q_proj.weight", "(heads head_dim) embed"),
    "layers.block.attention.k": Key("transformer.h.{}.attn.k_proj.weight", "(heads head_dim) embed"),
    "layers.block.attention.v": Key("transformer.h.{}.attn.v_proj.weight", "(heads head_dim) embed"),
    "layers.block.attention.out": Key("transformer.h.{}.attn.out_proj.weight", "embed (heads head_dim)"),
    "layers.block.mlp.up": Key("transformer.h.{}.mlp.fc_in.weight", "mlp embed"),
    "layers.block.mlp.up_bias": Key("transformer.h.{}.mlp.fc_in.bias", "mlp"),
    "layers.block.mlp.down": Key("transformer.h.{}.mlp.fc_out.weight", "embed mlp"),
    "layers.block.down_bias": Key("transformer.h.{}.mlp.fc_out.bias", "embed"),
    "norm.scale": Key("transformer.ln_f.weight", "embed"),
    "norm.bias": Key("transformer.ln_f.bias", "embed"),
    "unembedding": Key("lm_head.weight", "vocab embed"),
    "unembedding_bias": Key("lm_head.bias", "vocab"),
}


def _llama_to_hub(config, positions: int) -> dict:
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
        # Where transformers 4 and 5 look.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {"rope_theta": config.rope_theta, **rope},
        "tie_word_embeddings": config.tie_embeddings,
    }


def _llama_from_hub(hub: Mapping) -> dict:
    heads = hub["num_attention_heads"]
    rope = {**(hub.get("rope_scaling") or {}), **(hub.get("rope_parameters") or {})}
    return {
        "vocab": hub["vocab_size"],
        "embed": hub["hidden_size"],
        "layers": hub["num_hidden_layers"],
        "heads": heads,
        "kv_heads": hub.get("num_key_value_heads") or heads,
        "head_dim": hub.get("head_dim") or hub["hidden_size"] // heads,
        "mlp": hub["intermediate_size"],
        "rope_theta": float(rope.get("rope_theta", hub.get("rope_theta", 10000.0))),
        "rope_scaling": _scaling(rope),
        "norm_eps": hub.get("rms_norm_eps", 1e-6),
        "tie_embeddings": hub.get("tie_word_embeddings", False),
    }


def _mixtral_to_hub(config: MixtralConfig, positions: int) -> dict:
    if config.routing.bias_rate is not None or config.routing.capacity is not None:
        given = "bias_rate" if config.routing.bias_rate is not None else "capacity"
        raise UserError(
            "A Mixtral in a Hugging Face folder picks experts by their probabilities alone, and drops no token.",
            seen=f"{given}={getattr(config.routing, given)}",
            where=f"model.routing.{given}",
            fix="train with null",
        )
    return {
        **_llama_to_hub(config, positions),
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.routing.balance,
    }


def _mixtral_from_hub(hub: Mapping) -> dict:
    return {
        **_llama_from_hub(hub),
        "experts": hub["num_local_experts"],
        "experts_per_token": hub["num_experts_per_tok"],
        "routing": Routing(balance=hub.get("router_aux_loss_coef", 0.001)),
    }


def _mixtral_fused(text: str) -> tuple[str, Callable]:
    """Where `save_pretrained(save_original_format=False)` puts a tensor: all experts of a layer in one."""
    found = re.fullmatch(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.w([123])\.weight", text)
    if found is None:
        return text.replace(".block_sparse_moe.gate.", ".mlp.gate."), lambda whole: whole
    lead, expert, which = found[1], int(found[2]), found[3]
    if which == "2":
        return f"{lead}.mlp.experts.down_proj", lambda whole: whole[expert]
    half = 0 if which == "1" else 1
    return f"{lead}.mlp.experts.gate_up_proj", lambda whole: np.split(whole[expert], 2)[half]


def _scaling(rope: Mapping) -> LinearScaling | Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
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
    raise UserError(
        "Rotary frequencies are scaled in a way that is known.",
        seen=f"rope_type: {kind}",
        where="config.json",
        fix="use a model with the type default, linear or llama3",
    )


def _gpt2_to_hub(config: GPT2Config, positions: int) -> dict:
    return {
        "vocab_size": config.vocab,
        "n_positions": config.positions,
        "n_embd": config.embed,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp,
        "layer_norm_epsilon": config.norm_eps,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": config.scale_by_inverse_layer,
        "reorder_and_upcast_attn": config.upcast_attention,
    }


def _gpt2_from_hub(hub: Mapping) -> dict:
    return {
        "vocab": hub["vocab_size"],
        "positions": hub["n_positions"],
        "embed": hub["n_embd"],
        "layers": hub["n_layer"],
        "heads": hub["n_head"],
        "mlp": hub.get("n_inner") or 4 * hub["n_embd"],
        "norm_eps": hub.get("layer_norm_epsilon", 1e-5),
        "dropout": hub.get("resid_pdrop", 0.1),
        "scale_by_inverse_layer": hub.get("scale_attn_by_inverse_layer_idx", False),
        "upcast_attention": hub.get("reorder_and_upcast_attn", False),
    }


def _gptj_to_hub(config: GPTJConfig, positions: int) -> dict:
    if config.rope_theta != 10000.0:
        raise UserError(
            "A GPT-J in a Hugging Face folder has rotary frequencies of base 10000.",
            seen=f"rope_theta={config.rope_theta}",
            where="model.rope_theta",
            fix="train with model.rope_theta 10000",
        )
    return {
        "vocab_size": config.vocab,
        "n_positions": positions,
        "n_embd": config.embed,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp,
        "rotary_dim": config.rotary_dim,
        "layer_norm_epsilon": config.norm_eps,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _gptj_from_hub(hub: Mapping) -> dict:
    return {
        "vocab": hub["vocab_size"],
        "embed": hub["n_embd"],
        "layers": hub["n_layer"],
        "heads": hub["n_head"],
        "rotary_dim": hub["rotary_dim"],
        "mlp": hub.get("n_inner") or 4 * hub["n_embd"],
        "norm_eps": hub.get("layer_norm_epsilon", 1e-5),
        "head_bias": True,
    }


_GATED = {"hidden_act": "silu", "attention_bias": False}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            config=LlamaConfig,
            model_type="llama",
            architecture="LlamaForCausalLM",
            keys=_LLAMA_KEYS,
            to_hub=_llama_to_hub,
            from_hub=_llama_from_hub,
            fixed=_GATED | {"mlp_bias": False},
        ),
        Family(
            config=Qwen3Config,
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            keys=_QWEN3_KEYS,
            to_hub=_llama_to_hub,
            from_hub=_llama_from_hub,
            fixed=_GATED | {"use_sliding_window": False},
        ),
        Family(
            config=MixtralConfig,
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            keys=_MIXTRAL_KEYS,
            to_hub=_mixtral_to_hub,
            from_hub=_mixtral_from_hub,
            fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
            elsewhere=_mixtral_fused,
        ),
        Family(
            config=GPT2Config,
            model_type="gpt2",
            architecture="GPT2LMHeadModel",
            keys=_GPT2_KEYS,
            to_hub=_gpt2_to_hub,
            from_hub=_gpt2_from_hub,
            fixed={"activation_function": "gelu_new", "scale_attn_weights": True, "tie_word_embeddings": True},
        ),
        Family(
            config=GPTJConfig,
            model_type="gptj",
            architecture="GPTJForCausalLM",
            keys=_GPTJ_KEYS,
            to_hub=_gptj_to_hub,
            from_hub=_gptj_from_hub,
            fixed={"activation_function": "gelu_new", "tie_word_embeddings": False},
            zeros=(_GPTJ_KEYS["unembedding_bias"],),
        ),
    )
}


def family_of(config: ModelConfig) -> Family:
    """The family of a configuration.

    Raises:
        UserError: it has no form at Hugging Face.
    """
    for family in FAMILIES.values():
        if type(config) is family.config:
            return family
    raise UserError(
        "A model that is exported is of a family that Hugging Face has.",
        seen=type(config).__name__,
        where="model.family",
        fix=f"use one of: {', '.join(FAMILIES)}",
    )


def to_config_json(config: ModelConfig, *, positions: int, dtype: str) -> dict:
    """The contents of `config.json`.

    Args:
        config: our configuration.
        positions: the longest sequence, where our configuration does not say.
        dtype: of the weights.
    """
    family = family_of(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
        **family.to_hub(config, positions),
        **family.fixed,
    }


def from_config_json(hub: Mapping, where: str) -> ModelConfig:
    """Our configuration, from the contents of `config.json`.

    Args:
        hub: the contents.
        where: the file, for messages.

    Raises:
        UserError: the family, or something about this model, is not known here, or a field is absent.
    """
    family = FAMILIES.get(hub.get("model_type", ""))
    if family is None:
        raise UserError(
            "A model that is imported is of a family that is known here.",
            seen=f"model_type: {hub.get('model_type')}",
            where=where,
            fix=f"use one of: {', '.join(FAMILIES)}",
        )
    for field, value in family.fixed.items():
        if hub.get(field, value) != value:
            raise UserError(
                f"A {family.model_type} has {field} {value} here.",
                seen=f"{field}: {hub[field]}",
                where=where,
                fix="use a model without it",
            )
    try:
        return family.config(**family.from_hub(hub))
    except KeyError as error:
        raise UserError(
            f"The configuration of a {family.model_type} is complete.",
            seen=f"no {error.args[0]}",
            where=where,
            fix="take the folder's config.json as `save_pretrained` writes it",
        ) from None
