"""GPT-J's Hugging Face folders."""

from collections.abc import Mapping

from trellis import UserError
from trellis.hub import Family, Key
from trellis.models.gpt2.hub import ALIASES
from trellis.models.gptj.gptj import GPTJConfig
from trellis.models.llama.hub import given

_KEYS = {
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
_DROPPED = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}


def _to_hub(config: GPTJConfig, positions: int) -> dict:
    if config.rope_theta != 10000.0:
        raise UserError(
            "A GPT-J in a Hugging Face folder must have rotary frequencies of base 10000.",
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
        **_DROPPED,
    }


def _from_hub(hub: Mapping) -> dict:
    return {
        "vocab": hub["vocab_size"],
        "embed": hub["n_embd"],
        "layers": hub["n_layer"],
        "heads": hub["n_head"],
        "rotary_dim": hub["rotary_dim"],
        "mlp": given(hub, "n_inner", lambda: 4 * hub["n_embd"]),
        "norm_eps": hub.get("layer_norm_epsilon", 1e-5),
        "head_bias": True,
    }


FAMILY = Family(
    config=GPTJConfig,
    model_type="gptj",
    architecture="GPTJForCausalLM",
    keys=_KEYS,
    to_hub=_to_hub,
    from_hub=_from_hub,
    fixed={"activation_function": "gelu_new", "tie_word_embeddings": False},
    aliases=ALIASES,
    dropped=_DROPPED,
    zeros=(_KEYS["unembedding_bias"],),
)
