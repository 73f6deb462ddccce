"""GPT-2's Hugging Face folders."""

from collections.abc import Mapping

from trellis import UserError
from trellis.hub import Family, Key
from trellis.models.gpt2.gpt2 import GPT2Config
from trellis.models.llama.hub import given

_KEYS = {
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

ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def _to_hub(config: GPT2Config, positions: int) -> dict:
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


def _from_hub(hub: Mapping) -> dict:
    after, before = (hub.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop"))
    if after != before:
        raise UserError(
            "A GPT-2 must drop the same share after its table of tokens as after attention and feed-forward layers.",
            seen=f"embd_pdrop: {before}, resid_pdrop: {after}",
            where="config.json",
            fix="give both the share that training is to drop; nothing else reads them",
        )
    return {
        "vocab": hub["vocab_size"],
        "positions": hub["n_positions"],
        "embed": hub["n_embd"],
        "layers": hub["n_layer"],
        "heads": hub["n_head"],
        "mlp": given(hub, "n_inner", lambda: 4 * hub["n_embd"]),
        "norm_eps": hub.get("layer_norm_epsilon", 1e-5),
        "dropout": after,
        "scale_by_inverse_layer": hub.get("scale_attn_by_inverse_layer_idx", False),
        "upcast_attention": hub.get("reorder_and_upcast_attn", False),
    }


FAMILY = Family(
    config=GPT2Config,
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys=_KEYS,
    to_hub=_to_hub,
    from_hub=_from_hub,
    fixed={"activation_function": "gelu_new", "scale_attn_weights": True, "tie_word_embeddings": True},
    aliases=ALIASES,
    dropped={"attn_pdrop": 0.1},
)
