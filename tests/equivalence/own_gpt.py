"""A GPT of one's own, as somebody would write it from the documentation: public names only, and no mesh."""

import equinox as eqx
import jax

import trellis as tr
from trellis import nn

VOCAB, EMBED, HEADS, LAYERS = 64, 32, 4, 4


class Attention(eqx.Module):
    """Causal attention with rotary positions."""

    qkv: nn.Linear
    out: nn.Linear

    @staticmethod
    def init(key) -> "Attention":
        keys = jax.random.split(key)
        inner = {"heads": HEADS, "head_dim": EMBED // HEADS}
        return Attention(
            qkv=nn.Linear.init({"embed": EMBED}, {"qkv": 3, **inner}, key=keys[0]),
            out=nn.Linear.init(inner, {"embed": EMBED}, key=keys[1]),
        )

    def __call__(self, x: tr.NamedArray, rope, documents) -> tr.NamedArray:
        q, k, v = self.qkv(x).unbind("qkv")
        q, k = nn.rotate(q, rope), nn.rotate(k, rope)
        k, v = (y.rename(pos="key_pos", heads="kv_heads") for y in (k, v))
        return self.out(nn.attend(q, k, v, segment_ids=documents, save_name="attention"))


class Block(eqx.Module):
    """Attention, then a feed-forward layer, each on a norm and added to the stream."""

    attention_norm: nn.LayerNorm
    attention: Attention
    mlp_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear
    dropout: nn.Dropout

    @staticmethod
    def init(key) -> "Block":
        keys = jax.random.split(key, 3)
        embed, mlp = tr.Axis("embed", EMBED), tr.Axis("mlp", 4 * EMBED)
        return Block(
            attention_norm=nn.LayerNorm.init(embed, 1e-5),
            attention=Attention.init(keys[0]),
            mlp_norm=nn.LayerNorm.init(embed, 1e-5),
            up=nn.Linear.init(embed, mlp, key=keys[1]),
            down=nn.Linear.init(mlp, embed, key=keys[2]),
            dropout=nn.Dropout(0.1),
        )

    def __call__(self, x: tr.NamedArray, key, rope, documents) -> tr.NamedArray:
        x = x + self.attention(self.attention_norm(x), rope, documents)
        hidden = tr.save(tr.gelu(self.up(self.mlp_norm(x))), "hidden")
        return x + self.dropout(self.down(hidden), key)


class GPT(eqx.Module):
    """Tokens to hidden states; the table of tokens is the unembedding too."""

    embedding: nn.Embedding
    blocks: tr.Stacked
    norm: nn.LayerNorm

    @staticmethod
    def init(key) -> "GPT":
        keys = jax.random.split(key)
        return GPT(
            embedding=nn.Embedding.init({"vocab": VOCAB}, {"embed": EMBED}, key=keys[0], deviation=EMBED**-0.5),
            blocks=tr.Stacked.init(Block.init, tr.Axis("layers", LAYERS), key=keys[1]),
            norm=nn.LayerNorm.init(tr.Axis("embed", EMBED), 1e-5),
        )

    def __call__(self, tokens: tr.NamedArray, documents=None, *, key=None, policy=None) -> tr.NamedArray:
        rope = nn.rotary_tables(tr.arange(tokens.axis("pos")), tr.Axis("head_dim", EMBED // HEADS), 1e4)
        keys = None if key is None else tr.random.split(key, "layers", LAYERS)
        x = self.embedding(tokens)
        return self.norm(self.blocks.fold(x, rope, documents, each=(keys,), policy=policy))


def loss(model: GPT, batch: dict, key=None, policy=None) -> jax.Array:
    """Mean nats a token."""
    table = nn.tied(model.embedding.table, batch["tokens"])  # moved once, for both of its uses
    model = eqx.tree_at(lambda m: m.embedding.table, model, table)
    hidden = model(batch["tokens"], batch["documents"], key=key, policy=policy)
    sums = nn.next_token_loss(hidden, table, batch["targets"], batch["weights"])
    return sums.total / sums.tokens


def losses(model: GPT, batch: dict) -> tr.NamedArray:
    """Mean nats a token of each sequence."""
    logits = tr.dot(model(batch["tokens"], batch["documents"]), model.embedding.table, over="embed")
    nats = nn.cross_entropy(logits, batch["targets"]) * batch["weights"]
    return nats.sum("pos") / batch["weights"].sum("pos")
