"""GPT-OSS's Hugging Face folders."""

from collections.abc import Mapping

from trellis import UserError
from trellis.hub import Family, Key
from trellis.models.gpt_oss.gpt_oss import GptOssConfig
from trellis.models.llama.hub import DROPPED, KEYS, from_hub, to_hub
from trellis.models.mixtral.hub import balance, picked, refuse_others
from trellis.nn.moe import Routing

_LAYER = "model.layers.{}"
_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
_BLOCK = {
    path.removeprefix("layers.block."): key for path, key in KEYS.items() if ".mlp." not in path and ".block." in path
}
_BLOCK |= {
    "attention.q_bias": Key(f"{_ATTENTION}.q_proj.bias", "(heads head_dim)"),
    "attention.k_bias": Key(f"{_ATTENTION}.k_proj.bias", "(kv_heads head_dim)"),
    "attention.v_bias": Key(f"{_ATTENTION}.v_proj.bias", "(kv_heads head_dim)"),
    "attention.out_bias": Key(f"{_ATTENTION}.o_proj.bias", "embed"),
    "attention.sinks": Key(f"{_ATTENTION}.sinks", "heads"),
    "mlp.router": Key(f"{_MLP}.router.weight", "routes embed"),
    "mlp.router_bias": Key(f"{_MLP}.router.bias", "routes"),
    # The gate's columns alternate with the other product's.
    "mlp.gate": Key(f"{_MLP}.experts.gate_up_proj", "experts embed (mlp half)", half=0),
    "mlp.up": Key(f"{_MLP}.experts.gate_up_proj", "experts embed (mlp half)", half=1),
    "mlp.biases.gate": Key(f"{_MLP}.experts.gate_up_proj_bias", "experts (mlp half)", half=0),
    "mlp.biases.up": Key(f"{_MLP}.experts.gate_up_proj_bias", "experts (mlp half)", half=1),
    "mlp.down": Key(f"{_MLP}.experts.down_proj", "experts mlp embed"),
    "mlp.biases.down": Key(f"{_MLP}.experts.down_proj_bias", "routes embed"),
}
_KEYS = {path: key for path, key in KEYS.items() if ".block." not in path} | {
    f"layers.block.{which}.{path}": key._replace(first=first, step=2)
    for first, which in enumerate(("near", "far"))
    for path, key in _BLOCK.items()
}


def _kinds(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]


def _to_hub(config: GptOssConfig, positions: int) -> dict:
    refuse_others(config, "GPT-OSS")
    return {
        **to_hub(config, positions),
        "sliding_window": config.window,
        "layer_types": _kinds(config.layers),
        "swiglu_limit": config.swiglu_limit,
        "num_local_experts": config.experts,
        **picked(config),
    }


def _from_hub(hub: Mapping) -> dict:
    layers = hub["num_hidden_layers"]
    if (kinds := hub.get("layer_types") or _kinds(layers)) != _kinds(layers):
        raise UserError(
            "The layers of a GPT-OSS must alternate between sliding-window and full attention, a window first.",
            seen=f"layer_types: {', '.join(kinds)}",
            where="config.json",
            fix="use a model whose layers alternate",
        )
    if not (hub.get("rope_parameters") or hub.get("rope_scaling")):  # versions of transformers differ in what they take
        raise KeyError("rope_parameters")
    return {
        **from_hub({**hub, "layer_types": None, "sliding_window": None}),
        "window": hub["sliding_window"],
        "swiglu_limit": hub.get("swiglu_limit", 7.0),
        "experts": hub["num_local_experts"],
        "experts_per_token": hub["num_experts_per_tok"],
        "routing": Routing(balance=balance(hub)),
    }


FAMILY = Family(
    config=GptOssConfig,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys=_KEYS,
    to_hub=_to_hub,
    from_hub=_from_hub,
    fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
    dropped=DROPPED,
    defaults={"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
)
