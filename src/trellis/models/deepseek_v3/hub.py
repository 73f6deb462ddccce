"""DeepSeek-V3's Hugging Face folders."""

from collections.abc import Mapping

from trellis import UserError
from trellis.hub import Family, Key
from trellis.models.deepseek_v3.deepseek_v3 import DeepseekV3Config
from trellis.models.llama.hub import DROPPED, KEYS, from_hub, to_hub
from trellis.models.mixtral.hub import refuse_others
from trellis.models.qwen3_moe.hub import fused
from trellis.nn import LinearScaling, Llama3Scaling
from trellis.nn.moe import Routing

_LAYER = "model.layers.{}"
_ATTENTION, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
_EXPERT = f"{_MLP}.experts.{{}}"
_BLOCK = {
    "attention_norm.scale": Key(f"{_LAYER}.input_layernorm.weight", "embed"),
    "attention.q_down": Key(f"{_ATTENTION}.q_a_proj.weight", "q_latent embed"),
    "attention.q_norm.scale": Key(f"{_ATTENTION}.q_a_layernorm.weight", "q_latent"),
    "attention.q_up": Key(f"{_ATTENTION}.q_b_proj.weight", "(heads head_dim) q_latent"),
    "attention.kv_down": Key(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", "latents embed"),
    "attention.kv_norm.scale": Key(f"{_ATTENTION}.kv_a_layernorm.weight", "kv_latent"),
    "attention.kv_up": Key(f"{_ATTENTION}.kv_b_proj.weight", "(kv_heads head_dim) kv_latent"),
    "attention.out": Key(f"{_ATTENTION}.o_proj.weight", "embed (heads value_dim)"),
    "mlp_norm.scale": Key(f"{_LAYER}.post_attention_layernorm.weight", "embed"),
}
_QUERIES = Key(f"{_ATTENTION}.q_proj.weight", "(heads head_dim) embed")  # of models without a latent for them
_DENSE = {f"mlp.{name}": KEYS[f"layers.block.mlp.{name}"] for name in ("gate", "up", "down")}
_MIXTURE = {
    "mlp.router": Key(f"{_MLP}.gate.weight", "routes embed"),
    "mlp.bias": Key(f"{_MLP}.gate.e_score_correction_bias", "routes", dtype="float32"),
    "mlp.gate": Key(f"{_EXPERT}.gate_proj.weight", "mlp embed"),
    "mlp.up": Key(f"{_EXPERT}.up_proj.weight", "mlp embed"),
    "mlp.down": Key(f"{_EXPERT}.down_proj.weight", "embed mlp"),
    "mlp.shared.gate": Key(f"{_MLP}.shared_experts.gate_proj.weight", "mlp embed"),
    "mlp.shared.up": Key(f"{_MLP}.shared_experts.up_proj.weight", "mlp embed"),
    "mlp.shared.down": Key(f"{_MLP}.shared_experts.down_proj.weight", "embed mlp"),
}


def _keys(config: DeepseekV3Config) -> dict[str, Key]:
    block = _BLOCK if config.q_latent is not None else _BLOCK | {"attention.q_up": _QUERIES}
    return {
        **{path: key for path, key in KEYS.items() if ".block." not in path},
        **{f"first_layers.block.{path}": key for path, key in (block | _DENSE).items()},
        **{f"layers.block.{path}": key._replace(first=config.dense_layers) for path, key in (block | _MIXTURE).items()},
    }


def _to_hub(config: DeepseekV3Config, positions: int) -> dict:
    said = "scores", "normalize", "scale", "groups", "groups_per_token", "bias_rate", "shared_mlp"
    refuse_others(config, "DeepSeek-V3", allowed=said)
    routing = config.routing
    own = {
        "routing.scores": (routing.scores, "sigmoid", routing.scores == "sigmoid"),
        "routing.bias_rate": (routing.bias_rate, "0.001", routing.bias_rate is not None),
        "shared_mlp": (config.shared_mlp, f"a multiple of {config.mlp}", config.shared_mlp % config.mlp == 0),
    }
    for name, (value, theirs, holds) in own.items():
        if not holds:
            raise UserError(
                "A DeepSeek-V3 in a Hugging Face folder must pick experts by sigmoids and biases, and have shared "
                "experts of the others' width.",
                seen=f"{name}={'null' if value is None else value}",
                where=f"model.{name}",
                fix=f"train with {theirs}",
            )
    return {
        **to_hub(config, positions),
        "head_dim": config.rope_dim,
        "intermediate_size": config.dense_mlp,
        "moe_intermediate_size": config.mlp,
        "first_k_dense_replace": config.dense_layers,
        "q_lora_rank": config.q_latent,
        "kv_lora_rank": config.kv_latent,
        "qk_nope_head_dim": config.nope_dim,
        "qk_rope_head_dim": config.rope_dim,
        "v_head_dim": config.value_dim,
        "n_routed_experts": config.experts,
        "n_shared_experts": config.shared_mlp // config.mlp,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": routing.normalize,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.groups,
        "topk_group": routing.groups_per_token,
        "num_nextn_predict_layers": 0,
    }


def _from_hub(hub: Mapping) -> dict:
    shared = from_hub(hub)
    rope = {**(hub.get("rope_parameters") or {}), **(hub.get("rope_scaling") or {})}
    if (part := rope.get("mscale_all_dim")) and isinstance(shared["rope_scaling"], LinearScaling | Llama3Scaling):
        raise UserError(  # transformers lets scores grow by it, whatever scales positions
            "In a DeepSeek-V3 mscale_all_dim must come with YaRN.",
            seen=f"mscale_all_dim: {part}, rope_type: {shared['rope_scaling'].kind}",
            where="config.json",
            fix="use a model without it, or of the type yarn",
        )
    for name in ("kv_heads", "head_dim"):
        del shared[name]
    return {
        **shared,
        "dense_layers": hub["first_k_dense_replace"],
        "q_latent": hub["q_lora_rank"],
        "kv_latent": hub["kv_lora_rank"],
        "nope_dim": hub["qk_nope_head_dim"],
        "rope_dim": hub["qk_rope_head_dim"],
        "value_dim": hub["v_head_dim"],
        "dense_mlp": hub["intermediate_size"],
        "mlp": hub["moe_intermediate_size"],
        "shared_mlp": hub["moe_intermediate_size"] * hub["n_shared_experts"],
        "experts": hub["n_routed_experts"],
        "experts_per_token": hub["num_experts_per_tok"],
        "routing": Routing(
            scores="sigmoid",
            normalize=hub.get("norm_topk_prob", True),
            scale=hub["routed_scaling_factor"],
            groups=hub["n_group"],
            groups_per_token=hub["topk_group"],
            bias_rate=0.001,
        ),
    }


FAMILY = Family(
    config=DeepseekV3Config,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys=_keys,
    to_hub=_to_hub,
    from_hub=_from_hub,
    fixed={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
    dropped=DROPPED,
    elsewhere=fused,
)
