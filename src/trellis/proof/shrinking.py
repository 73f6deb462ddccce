"""A run with its sizes shrunk so that its step takes seconds to execute here, while its structure stays.

Loops stay loops (layers, microbatches, chunks of the loss, stages), what is sliced stays sliced into as many parts,
what is padded stays padded, key heads stay shared, and sizes that decide between two ways decide alike.
"""

import dataclasses
import math
from typing import Any

from trellis.mesh import Layout
from trellis.models.protocol import stacked
from trellis.named.pipeline.by_vmap import microbatches_of
from trellis.nn.loss.token_chunks import accelerator_chunk
from trellis.nn.loss.vocab_chunks import cut
from trellis.nn.rope import QUERY
from trellis.run.config import Run
from trellis.train.assemble import vocab_multiple

# Sizes that are enough for what is in them: a width for several tiles of every device, a sequence for two blocks of an
# attention kernel, layers for a first, a middle and a last one.
EMBED, HEAD_DIM, MLP, VOCAB, POS, LAYERS = 256, 64, 384, 1024, 256, 3
LATENT = {"nope_dim": HEAD_DIM, "rope_dim": HEAD_DIM // 2, "value_dim": HEAD_DIM}
MOST_CHUNKS, EXPERT_GROUPS = 3, 4


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A run of smaller sizes.

    Attributes:
        run: the run.
        chunk_bytes: of the loss, so that it has several chunks if the large one has; None for one chunk.
        left_out: what the run asks for and this one does not, a sentence each.
    """

    run: Run
    chunk_bytes: int | None
    left_out: tuple[str, ...] = ()


def shrunk(run: Run, layout: Layout) -> Shrunk:
    """The run with sizes shrunk for a layout, whose mesh stays as it is.

    Nothing is rounded if a last bit would show as a thousand of them: the optimizer's state is not narrowed, updates go
    to the nearest number, and tokens that go to experts in eight bits go as words of all their bits, the same way.
    Scales are those of the step's own numbers, which no earlier ones clip.

    Args:
        run: the run; its mesh fits the layout's devices.
        layout: its layout on these.
    """
    ways = Ways(layout)
    rows, few = _rows(run, ways), _few(run, ways)
    pos = min(run.data.sequence_length, math.lcm(max(POS, 128 * ways.context), ways("pos")))
    model = _model(run, ways, pos, tokens=rows * pos if few else 0)
    if not few:
        rows = _cut_by_stages(max(rows, model.embed * ways("pos") // pos + 1), run, ways)
    parts = min(run.parts, 2)
    small = dataclasses.replace(
        run,
        model=model,
        data=dataclasses.replace(run.data, sequence_length=pos),
        batch_size=rows * ways("batch") * parts,
        microbatches=parts,
        precision=dataclasses.replace(run.precision, moments={}, updates="nearest", amax_history=0),
    )
    return Shrunk(small, _chunk_bytes(run, small, ways, few=few), _left_out(run))


def _left_out(run: Run) -> tuple[str, ...]:
    """The options of a run that its shrunk one does without, and what it does instead."""
    precision = run.precision
    said = {
        "precision.amax_history: scales are those of the step's own numbers": precision.amax_history > 0,
        "precision.moments: moving averages are kept in the parameters' type": bool(precision.moments),
        "precision.updates random: updated parameters are rounded to the nearest number": precision.updates == "random",
    }
    return tuple(sentence for sentence, asked in said.items() if asked)


class Ways:
    """Into how many parts a layout cuts a name, at rest or in use."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self.padding = vocab_multiple(layout)

    def __call__(self, name: str, *which: str) -> int:
        parts = (self._layout.assign((name,), kind)[0] for kind in which or ("params", "compute"))
        return math.lcm(*(self._size(axes) for axes in parts))

    @property
    def context(self) -> int:
        """Parts of the positions that attention sees."""
        return self._size(self._layout.assign(QUERY)[1])

    @property
    def exchanged(self) -> int:
        """Parts of the positions that become parts of the heads in attention."""
        kinds = dict(self._layout.context)
        return self._size(tuple(axis for axis in self._layout.assign(QUERY)[1] if kinds.get(axis) == "exchange"))

    def microbatches(self, rows: int) -> int:
        """Parts in which sequences follow each other through stages, if each device has so many."""
        ((axis,),) = self._layout.assign(("layers",))
        return microbatches_of(self._layout, axis, rows * self("batch"))

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._layout.mesh.shape[axis] for axis in axes)


def multiple(least: int, of: int) -> int:
    """The smallest multiple of `of` that is no less than `least`.

    >>> multiple(100, 16)
    112
    """
    return -(-least // of) * of


def _kept(size: int, ways: int, most: int) -> int:
    """A size with at most `most` entries on each device, and at least one."""
    return ways * max(1, min(size // ways, most))


def _model(run: Run, ways: Ways, pos: int, tokens: int) -> Any:
    """The model's configuration, with smaller values for the sizes that it has.

    Args:
        run: the run.
        ways: into how many parts its axes are cut.
        pos: the new length of a sequence.
        tokens: of a device, where there are to be no more of them than `embed`.
    """
    model: Any = run.model
    has = {field.name for field in dataclasses.fields(model)}.__contains__
    heads, kv_heads = _heads(model, ways)
    each, before = divmod(model.layers, blocks := stacked(model))  # layers of a block, and those that are not stacked
    groups = ways("layers") * run.layout.pipeline_groups
    uneven = blocks % groups > 0  # some groups have a layer less, and at rest stages slice the width instead
    kept = _kept(blocks, groups, 2 if ways("layers") > 1 else LAYERS) + uneven
    sizes = {"heads": heads, "layers": before + each * kept}
    wide = ways("embed") * (ways("layers") if uneven else 1)
    embed = multiple(max(min(model.embed, EMBED), 2 * wide, tokens), wide)
    if has("head_dim"):
        sizes |= {"head_dim": min(model.head_dim, HEAD_DIM), "kv_heads": kv_heads}
    elif has("rope_dim"):
        sizes |= {name: min(getattr(model, name), most) for name, most in LATENT.items()}
        latents = ("q_latent", "kv_latent") if model.q_latent is not None else ("kv_latent",)
        sizes |= {name: min(getattr(model, name), embed) for name in latents}
        sizes |= {name: min(getattr(model, name), MLP) for name in ("dense_mlp", "shared_mlp")}
    else:
        each = min(model.embed // model.heads, HEAD_DIM)
        embed = multiple(embed, math.lcm(each * ways("heads") * ways.exchanged, wide))
        if embed > model.embed:
            embed, each = model.embed, model.embed // model.heads
        sizes["heads"] = embed // each
        if has("rotary_dim"):
            sizes["rotary_dim"] = min(model.rotary_dim, each)
    sizes["embed"] = min(embed, model.embed)
    sizes["mlp"] = min(model.mlp, multiple(MLP, 64 * ways("mlp")))
    sizes["vocab"] = _vocab(model.vocab, ways)
    if has("experts"):
        sizes |= _experts(model, ways)
    if has("window"):
        sizes["window"] = min(model.window, pos)
    if has("positions"):
        sizes["positions"] = pos if model.positions == run.data.sequence_length else 2 * pos
    return dataclasses.replace(model, **sizes)


def _experts(model: Any, ways: Ways) -> dict[str, Any]:
    """Two experts a device, and two in each group. A token sees half of the groups if it does not see all, and goes to
    half of the experts that it sees if it does not go to all."""
    routing = model.routing
    groups = min(routing.groups, EXPERT_GROUPS)
    seen = groups if routing.groups_per_token == routing.groups else max(groups // 2, 1)
    least = max(_kept(model.experts, ways("experts"), 2), min(model.experts, 4), 2 * groups if groups > 1 else 0)
    experts = multiple(least, math.lcm(ways("experts"), groups))
    seen_experts, all_seen = experts // groups * seen, model.experts // routing.groups * routing.groups_per_token
    per_token = seen_experts if model.experts_per_token == all_seen else max(seen_experts // 2, 2)
    return {
        "experts": experts,
        "experts_per_token": min(model.experts_per_token, per_token),
        "routing": dataclasses.replace(
            routing, groups=groups, groups_per_token=seen, dispatch=routing.dispatch and "bits"
        ),
    }


def _heads(model: Any, ways: Ways) -> tuple[int, int]:
    """Heads and key heads: two key heads a device if there are so many, each shared if the run's are, and exchanged for
    positions if they are; the run's own if there are no fewer that every device could have alike."""
    groups, parts, of_keys = model.heads // model.kv_heads, ways("heads") * ways.exchanged, ways("kv_heads")
    exchanged = lambda keys: keys % (of_keys * ways.exchanged) == 0

    def alike(keys: int, shared: int) -> bool:
        each, rest = divmod(keys * shared, parts)
        return not rest and exchanged(keys) == exchanged(model.kv_heads) and (each % shared == 0 or shared % each == 0)

    small = range(_kept(model.kv_heads, of_keys, 2), model.kv_heads + 1, of_keys)
    found = ((keys, shared) for keys in small for shared in range(min(groups, 2), groups + 1) if alike(keys, shared))
    keys, shared = next(found, (model.kv_heads, groups))
    return keys * shared, keys


def _vocab(vocab: int, ways: Ways) -> int:
    """A vocabulary with several tiles a device for each chunk of the loss, padded if the large one is."""
    small = multiple(VOCAB, 8 * MOST_CHUNKS * max(ways.padding, ways("vocab")))
    return min(small - (5 if vocab % ways.padding else 0), vocab)


def _rows(run: Run, ways: Ways) -> int:
    """Sequences of a device in a microbatch: one if there is one, else two, or what the pipeline needs."""
    largest = max(entry.size for entry in run.batch_sizes())
    return _cut_by_stages(max(min(largest // (ways("batch") * run.parts), 2), 1), run, ways)


def _cut_by_stages(rows: int, run: Run, ways: Ways) -> int:
    """As many sequences or more, which a pipeline's microbatches cut into equal parts; with several groups of layers,
    these are a multiple of the stages."""
    stages, asked, groups = ways("layers", "compute"), run.layout.pipeline_microbatches, run.layout.pipeline_groups
    while rows * stages % asked if asked else groups > 1 and ways.microbatches(rows) % stages:
        rows += 1
    return rows


def _few(run: Run, ways: Ways) -> bool:
    """Whether a device has no more tokens in a microbatch than `embed`: then the loss takes another way."""
    largest = max(entry.size for entry in run.batch_sizes())
    return largest * run.data.sequence_length <= run.model.embed * ways("batch") * ways("pos") * run.parts


def _chunk_bytes(run: Run, small: Run, ways: Ways, *, few: bool) -> int | None:
    """Bytes of a chunk's logits with which the small run's loss has as many chunks as the large one's, or three."""
    at_rest, in_use = ways("vocab", "params"), ways("vocab", "compute")

    def sizes(run: Run) -> tuple[int, int]:
        """Tokens of a device, and the columns of the vocabulary that it sees."""
        tokens = max(b.size for b in run.batch_sizes()) * run.data.sequence_length // run.parts
        return tokens // (ways("batch") * ways("pos")), multiple(run.model.vocab, ways.padding) // in_use

    tokens, columns = sizes(run)
    if few and in_use == 1 and at_rest * ways("embed", "params") > 1:
        number = cut(0, (), at_rest, columns // at_rest, tokens).number
    else:
        number = -(-tokens // accelerator_chunk(tokens, columns))
    if number == 1:
        return None
    tokens, columns = sizes(small)
    return -(-4 * tokens * columns // min(number, MOST_CHUNKS))
