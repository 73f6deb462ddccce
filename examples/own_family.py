"""A family of models of one's own in Trellis's trainer, in a file outside of the package.

    python examples/own_family.py

A Llama whose feed-forward block is a squared ReLU. `trellis.models` says what the trainer needs of a model
(`LanguageModel`) and of what defines one (`FamilyConfig`). With both, `assemble` makes layout, optimizer and step of a
`Run`, `Loader` reads its text, and the planner plans it for hardware that is not here.
"""

import dataclasses
from typing import Literal

import equinox as eqx
import jax

import trellis as tr
from trellis import nn
from trellis.data import Batches, Loader, embedded_corpus, open_store, tokenize
from trellis.models import Output
from trellis.plan import quick_plan, target
from trellis.recipes import tiny
from trellis.train import Checkpoints, CompiledStep, MeshSizes, assemble, find_devices


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Relu2Config:
    """What defines a model: its sizes, and `init`."""

    family: Literal["relu2"] = "relu2"
    vocab: int
    embed: int
    layers: int
    heads: int
    mlp: int
    positions = None  # sequences may have any length
    experts = experts_per_token = 1
    tie_embeddings = True

    @property
    def kv_heads(self) -> int:
        """Every head has keys of its own."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.embed // self.heads

    def init(self, *, key, vocab_multiple: int = 1) -> "Relu2":
        """The model with fresh parameters, its vocabulary padded to a multiple."""
        keys = jax.random.split(key)
        vocab, embed = tr.Axis("vocab", -(-self.vocab // vocab_multiple) * vocab_multiple), tr.Axis("embed", self.embed)
        return Relu2(
            embedding=nn.normal(keys[0], (vocab, embed), deviation=self.embed**-0.5),
            layers=tr.Stacked.init(lambda key: Block.init(self, key=key), tr.Axis("layers", self.layers), key=keys[1]),
            norm=nn.RMSNorm.init(embed, 1e-6),
            config=self,
        )


class Block(eqx.Module):
    """One layer. The trainer may give it another attention: of a pipeline, or with a cache when generating."""

    norm: nn.RMSNorm
    qkv: nn.Linear
    out: nn.Linear
    mlp_norm: nn.RMSNorm
    up: nn.Linear
    down: nn.Linear

    @staticmethod
    def init(config: Relu2Config, *, key) -> "Block":
        keys = jax.random.split(key, 4)
        embed, mlp = tr.Axis("embed", config.embed), tr.Axis("mlp", config.mlp)
        heads = tr.Axis("heads", config.heads), tr.Axis("head_dim", config.head_dim)
        return Block(
            norm=nn.RMSNorm.init(embed, 1e-6),
            qkv=nn.Linear.init(embed, (tr.Axis("qkv", 3), *heads), key=keys[0], bias=False),
            out=nn.Linear.init(heads, embed, key=keys[1], bias=False),
            mlp_norm=nn.RMSNorm.init(embed, 1e-6),
            up=nn.Linear.init(embed, mlp, key=keys[2], bias=False),
            down=nn.Linear.init(mlp, embed, key=keys[3], bias=False),
        )

    def __call__(self, x: tr.NamedArray, rope, segment_ids, attention=nn.attend) -> tr.NamedArray:
        q, k, v = self.qkv(self.norm(x)).unbind("qkv")
        q, k = nn.rotate(q, rope), nn.rotate(k, rope)
        k, v = (y.rename(pos="key_pos", heads="kv_heads") for y in (k, v))
        x = x + self.out(attention(q, k, v, segment_ids=segment_ids, save_name="attention"))
        hidden = tr.save(tr.relu(self.up(self.mlp_norm(x))), "mlp_up")
        return x + self.down(tr.square(hidden))


class Relu2(eqx.Module):
    """The model: tokens to hidden states, which the loss multiplies by `unembedding`."""

    embedding: nn.Table
    layers: tr.Stacked
    norm: nn.RMSNorm
    config: Relu2Config = eqx.field(static=True)
    first_layers = unembedding_bias = None
    looks_ahead = False

    @property
    def unembedding(self) -> tr.NamedArray:
        return self.embedding

    def start(self, tokens: tr.NamedArray, segment_ids=None, positions=None, key=None):
        """The stream before the first layer, what each layer gets of its own, and what all layers get."""
        positions = tr.arange(tokens.axis("pos")) if positions is None else positions
        rope = nn.rotary_tables(positions, tr.Axis("head_dim", self.config.head_dim), 1e4)
        return tr.take(self.embedding, "vocab", tokens), (), (rope, segment_ids)

    def __call__(
        self, tokens, *, segment_ids=None, positions=None, policy=None, key=None, counted=None, ahead=None
    ) -> Output:
        x, each, shared = self.start(tokens, segment_ids, positions, key)
        return Output(self.norm(self.layers.fold(x, *shared, each=each, policy=policy)))


def main() -> list[float]:
    """Trains the family on four devices, and plans it for a slice of v5p."""
    model = Relu2Config(vocab=512, embed=64, layers=2, heads=4, mlp=128)
    run = dataclasses.replace(tiny(), model=model, devices=4, mesh=MeshSizes(data=2, model=2))
    tokenize(embedded_corpus("validation"), "stores/code", train_bpe=model.vocab)
    sizes = {"sequence_length": run.data.sequence_length, "batch_size": run.batch_size}
    batches = Batches(open_store("stores/code"), **sizes, seed=run.seed)
    assembled, losses = assemble(run, find_devices(run)), []
    step = CompiledStep(assembled.step, assembled.compiler_options)
    loader = Loader(batches, assembled.batch_sharding, start_step=0)
    with assembled.layout, loader, Checkpoints("checkpoints") as checkpoints:
        state = assembled.init()
        for _ in range(run.steps):
            _, batch = next(loader)
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        checkpoints.save(run.steps, state)
    print(f"loss {losses[0]:.3f} after the first step, {losses[-1]:.3f} after {run.steps}")
    plan = quick_plan(dataclasses.replace(run, devices=None), target("v5p:2x2x1"))
    print(f"on v5p:2x2x1: {plan.memory.peak / 2**20:.1f} MiB of a device, {1e6 * plan.seconds:.0f} us a step")
    return losses


if __name__ == "__main__":
    losses = main()
    assert losses[-1] < losses[0] - 1
