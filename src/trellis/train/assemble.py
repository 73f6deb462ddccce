"""From a run to what trains it: the layout, the optimizer, the state and the step."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from trellis.data.batch import Batch
from trellis.errors import UserError, did_you_mean
from trellis.frozen import FrozenMap
from trellis.mesh import Layout
from trellis.mesh.layout import without_layout
from trellis.mesh.platform import are_cpus, platform_of_devices, rehearses, rows_of_a_tile
from trellis.models import LanguageModel, ModelConfig
from trellis.models.protocol import dropout
from trellis.named import is_named
from trellis.named.backend import has_block_units
from trellis.named.saving import Keep, nothing, products, saved
from trellis.nn.parameters import Parameter, Role, parameters
from trellis.nn.precision import unembedding_of
from trellis.notation import typeof
from trellis.notation.state import mode_of
from trellis.optim import learning_rates, make_optimizer
from trellis.optim.narrow import narrow_parts
from trellis.run.config import Remat, Run
from trellis.run.layouts import make_layout
from trellis.run.lengths import as_of_phase
from trellis.run.on_mesh import check_on_mesh
from trellis.run.tiles import check_tiles
from trellis.train.compilation import options_for
from trellis.train.state import TrainState, new_state
from trellis.train.step import StepOptions, make_step

# The approximate bytes that one channel of a microbatch takes on a CPU device.
_PART_BYTES = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """What a run becomes on given devices, which need not exist here.

    Attributes:
        run: the run.
        layout: its mesh and maps.
        optimizer: the update rule.
        options: how a step computes.
        init: makes the first state.
        abstract: the state as `jax.ShapeDtypeStruct`s with shardings.
        step: the step under `jax.jit`, its state donated; call and lower it inside `with layout:`.
        later: what the run becomes once sequences have another length, by the first step of each length. The attributes
            above are those of the first length.
    """

    run: Run
    layout: Layout
    optimizer: optax.GradientTransformation
    options: StepOptions
    init: Callable[[], TrainState]
    abstract: TrainState
    step: Any
    later: Mapping[int, "Assembled"] = FrozenMap()

    def at(self, step: int) -> "Assembled":
        """The `Assembled` that makes the step of this index."""
        return [self, *(self.later[start] for start in sorted(self.later) if start <= step)][-1]

    def phases(self) -> dict[int, "Assembled"]:
        """The `Assembled` of each phase, in order, by the index of its first step."""
        return {0: self, **{start: self.later[start] for start in sorted(self.later)}}

    def takes(self, state: TrainState) -> TrainState:
        """A state of the run as a state of this length's model. Its arrays are the same for every length."""
        return jax.tree.unflatten(jax.tree.structure(self.abstract), jax.tree.leaves(state))

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch's arrays."""
        return self.layout.sharding(("batch", "pos"))

    @property
    def compiler_options(self) -> dict[str, str]:
        """The compiler's options for the step."""
        mesh = self.layout.mesh
        return options_for(platform_of_devices(mesh), self.run.compiler_options, mesh.size)

    @property
    def largest(self) -> int:
        """The first step with the most sequences, which is the one that takes the most memory if the batch grows. If
        sequences have several lengths, it is one of the first length."""
        return max(self.run.at(0).batch_sizes(), key=lambda entry: entry.size).step

    def abstract_batch(self, step: int = 0) -> Batch:
        """The batch of a step as `jax.ShapeDtypeStruct`s with shardings."""
        run = self.run.at(step)
        size = [entry.size for entry in run.batch_sizes() if entry.step <= step][-1]
        shape = (size, run.data.sequence_length)

        ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        mask = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.batch_sharding)
        batch = Batch(tokens=ids, targets=ids, loss_mask=mask, segment_ids=ids, positions=ids)
        return batch if self.run.data.mask_documents else batch.without_documents()


def assemble(
    run: Run,
    devices: Sequence[Any],
    *,
    padding: int | None = None,
    chunk_bytes: int | None = None,
    names_tensors: bool | None = None,
) -> Assembled:
    """Everything that a run trains with, on devices: real, simulated or only described.

    Args:
        run: the run.
        devices: where it trains.
        padding: the vocabulary is padded to a multiple of this; None for what the layout requires.
        chunk_bytes: the bytes of the float32 logits of a chunk of the loss; None for what suits the devices.
        names_tensors: whether a step finds its first weight or gradient that is not finite; None: only if its numbers
            have a small range.

    Raises:
        UserError: the mesh does not fit the devices, or the run the mesh.
    """
    if not run.lengths:
        return _assemble(run, devices, padding, chunk_bytes, names_tensors)
    made = {}
    for phase in run.phases():
        with as_of_phase(phase.start):
            made[phase.start] = _assemble(phase.run, devices, padding, chunk_bytes, names_tensors)
    first = made.pop(0)
    return dataclasses.replace(first, run=run, later=FrozenMap(made))


def _assemble(
    run: Run, devices: Sequence[Any], padding: int | None, chunk_bytes: int | None, names_tensors: bool | None
) -> Assembled:
    """The same for a run of one length."""
    layout = layout_of(run, devices)
    optimizer = make_optimizer(
        run.optimizer,
        run.schedule,
        steps=run.steps,
        clip_norm=run.clip_norm,
        exclude=run.weight_decay_exclude,
        narrow=(lambda p: run.precision.moments_of(p) is not None) if run.precision.moments else None,
        vocab_size=run.model.vocab,
    )
    multiple = padding or vocab_multiple(layout)

    def make_model(key: jax.Array) -> Any:
        return run.precision.at_rest(run.model.init(key=key, vocab_multiple=multiple))

    with layout:
        kept = dict(average=run.ema is not None, precision=run.precision)
        make = lambda: new_state(make_model, optimizer, run.seed, **kept)
        shapes = jax.eval_shape(make)  # traced once, both for its types and for running it
        _check_parts_of_names(run, shapes.model)
        _check_narrow_products(run, shapes.model)
        _check_four_bits(run, layout)
        _check_delayed(run, shapes.model)
        _check_narrow_moments(run, shapes)
        abstract = _placed(shapes, layout)
        options = StepOptions(
            precision=run.precision,
            microbatches=run.microbatches or fast_microbatches(run, layout, abstract.model),
            accumulation=run.accumulation,
            policy=keep_of(run.remat),
            z_loss=run.z_loss,
            ema=run.ema,
            tuned=run.cpu.tuned._replace(scan_layers=run.scan_layers),
            chunk_bytes=chunk_bytes,
            skip_nonfinite=run.skip_nonfinite > 0,
            names_tensors=run.precision.is_narrow if names_tensors is None else names_tensors,
        )
        several = options.microbatches > 1 or run.mesh.stage > 1
        gathered_first = several and options.accumulation == "pending"
        check_tiles(run, layout, shapes.model, at_rest=not gathered_first)
        shardings = jax.tree.map(lambda x: x.sharding, abstract)
        init = jax.jit(make, out_shardings=shardings)
        rates = learning_rates(run.schedule, run.optimizer.learning_rate, run.steps)
        step = make_step(optimizer, options, rates)
    # The types say that a step's results are sharded as its arguments are; a compiler that places them has to be told.
    results = {} if mode_of(layout.mesh) == "explicit" else {"out_shardings": (shardings, None)}
    return Assembled(
        run=run,
        layout=layout,
        optimizer=optimizer,
        options=options,
        init=init,
        abstract=abstract,
        step=jax.jit(step, donate_argnums=0, **results),
    )


@functools.cache
def model_axes(config: ModelConfig) -> dict[str, int]:
    """The lengths of the axes of a model's parameters, by name.

    >>> from trellis.recipes import tiny
    >>> model_axes(tiny().model)["kv_heads"]
    2
    """
    return {
        name: size for p in parameters(model_types(config)) if is_named(p.leaf) for name, size in p.leaf.shape.items()
    }


def layout_of(run: Run, devices: Sequence[Any]) -> Layout:
    """The layout of a run of one length.

    Raises:
        UserError: the mesh does not fit the devices, or the run the mesh.
    """
    layout = make_layout(run.mesh, run.layout, devices, model_axes(run.model))
    check_on_mesh(run, layout, model_types(run.model))
    return layout


@functools.cache
def model_types(config: ModelConfig) -> LanguageModel:
    """The types of a model, without a layout.

    Raises:
        UserError: its layers have another name, or its unembedding is no parameter.
    """

    def checked() -> LanguageModel:
        model = config.init(key=jax.random.key(0))
        where, axis = type(model).__name__, model.layers.axis
        if axis.name != "layers":
            raise UserError(
                "A model's layers must be stacked along an axis of the name `layers`.",
                seen=f"{axis.size} of them along `{axis.name}`",
                where=f"{where}.layers",
                fix=f"stack them by Stacked.init(make, Axis('layers', {axis.size}), key=key)",
            )
        if not any(p.leaf is model.unembedding for p in parameters(model)):
            raise UserError(
                "A model's unembedding must be one of its parameters, as it is.",
                seen=f"{typeof(model.unembedding)}, which is computed",
                where=f"{where}.unembedding",
                fix="return the parameter, and put what it is multiplied by into `norm` or the end of `__call__`",
            )
        return model

    with without_layout():  # a caller's may be in force
        return jax.eval_shape(checked)


def _check_parts_of_names(run: Run, model: Any) -> None:
    """Refuses parts of parameters' names that no parameter has, except for a run's own defaults."""
    known = parameters(model)
    default: Any = next(f.default for f in dataclasses.fields(Run) if f.name == "weight_decay_exclude")
    asked = {"weight_decay_exclude": {*run.weight_decay_exclude} - {*default}}
    asked["precision.exceptions"] = {*run.precision.exceptions}
    asked["precision.products"] = {*run.precision.products}
    asked["precision.moments"] = {*run.precision.moments}
    for field, parts in asked.items():
        for part in sorted(parts):
            if not part or not any(p.matches((part,)) for p in known):
                words = {word for p in known for word in (*p.path.split("."), *p.names)}
                raise UserError(
                    "A part of names must match the name of at least one parameter, or one of its axes.",
                    seen=f"`{part}`",
                    where=field,
                    fix=did_you_mean(part, words),
                )
    multiplying = [p for p in known if run.precision.product_of(p)] + [unembedding_of(model)]
    _check_heeded("precision.products", run.precision.products, multiplying)
    _check_heeded("precision.exceptions", run.precision.exceptions, known)


def _check_heeded(field: str, asked: Mapping[str, str], known: Sequence[Parameter]) -> None:
    """Refuses a part of names if earlier parts that ask for something else already name all of its parameters."""
    for part, wanted in asked.items():
        firsts = [next(e for e in asked if p.matches((e,))) for p in known if p.matches((part,))]
        others = [first for first in firsts if asked[first] != wanted]
        if others and part not in firsts:
            raise UserError(
                "Of several parts that match a parameter's name, only the first one listed applies.",
                seen=f"`{part}: {wanted}`, after `{others[0]}: {asked[others[0]]}`, which matches its parameters",
                where=field,
                fix=f"list `{part}` before `{others[0]}`, or leave it out",
            )


def _check_narrow_products(run: Run, model: Any) -> None:
    """Refuses parts of names that ask for narrow products where there are none: for anything but weights of layers and
    the unembedding, and for experts' weights in types with blocks."""
    precision, head = run.precision, unembedding_of(model)
    marked = [(p, kind) for p in parameters(model) if (kind := precision.product_of(p))]
    if kind := precision.loss_product(model):
        marked.append((head, kind))
    for part in precision.products:
        if not any(p.matches((part,)) for p, _ in marked):
            raise _no_narrow_product(f"`{part}`, which matches no weight that multiplies", model)
    for p, kind in marked:
        layer = p.of_layers
        able = ("fp8", "mxfp8") if not layer else ("fp8", "int8") if "experts" in p.names else (kind,)
        if not layer and p.path != head.path:
            raise _no_narrow_product(f"{kind} for `{p.path}`", model)
        if kind not in able:
            kinds = " or ".join(able)
            fix = f"use {kinds} for it, or name parts that do not match it" if layer else f"use {kinds} for it"
            raise _no_narrow_product(f"{kind} for `{p.path}`", model, fix)


def _no_narrow_product(seen: str, model: Any, fix: str = "") -> UserError:
    weights = [p for p in parameters(model) if p.role == Role.WEIGHT and p.of_layers and "routes" not in p.names]
    able = [p.path.removeprefix("layers.") for p in weights]
    return UserError(
        "Narrow products must be those of layers' weights (of experts in fp8 or int8) or of the unembedding (in fp8 or "
        "mxfp8, which can represent small probabilities).",
        seen=seen,
        where="precision.products",
        fix=fix or f"name parts of {', '.join(f'`{path}`' for path in able)}, or `vocab`",
    )


def _check_four_bits(run: Run, layout: Layout) -> None:
    """Refuses nvfp4 products on chips that have no units for them, and in stages, which have no keys for them."""
    if "nvfp4" not in run.precision.products.values():
        return
    device = layout.mesh.devices.flat[0]
    if not are_cpus(layout.mesh) and not has_block_units(device.device_kind):
        raise UserError(
            "Products in nvfp4 need an NVIDIA GPU from Blackwell on; a CPU emulates them.",
            seen=f"nvfp4 on {device.device_kind}",
            where="precision.products",
            fix="use fp8, or int8",
        )
    if run.mesh.stage != 1:
        raise UserError(
            "Products in nvfp4 cannot be used in a pipeline: its stages have no keys for rounding gradients.",
            seen=f"nvfp4 with mesh.stage={run.mesh.stage}",
            where="precision.products",
            fix="use --mesh.stage 1, or fp8",
        )


def _check_delayed(run: Run, model: Any) -> None:
    """Refuses delayed scales for experts' products, and in stages, which keep none, and where no product has any."""
    products = [(p, kind) for p in parameters(model) if (kind := run.precision.product_of(p))]
    experts = [p.path for p, _ in products if "experts" in p.names]
    seen = f"mesh.stage={run.mesh.stage}" if run.mesh.stage != 1 else f"products of `{experts[0]}`" if experts else ""
    if run.precision.amax_history and seen:
        raise UserError(
            "Delayed scales cannot be used in pipeline stages or for experts.",
            seen=f"amax_history={run.precision.amax_history} with {seen}",
            where="precision.amax_history",
            fix="use --precision.amax_history 0",
        )
    if run.precision.amax_history and not {"fp8", "int8"} & {kind for _, kind in products}:
        raise UserError(
            "Delayed scales are for products of layers' weights in fp8 or int8; those of the loss are current.",
            seen=f"amax_history={run.precision.amax_history}, products={dict(run.precision.products)}",
            where="precision.amax_history",
            fix="use --precision.amax_history 0, or fp8 for weights of layers too",
        )


def _check_narrow_moments(run: Run, state: TrainState) -> None:
    """Refuses parts of names for which the optimizer keeps nothing that could be in eight bits."""
    parts = run.precision.moments
    if parts and (left := sorted(set(parts) - narrow_parts(state.optimizer, parts))):
        raise UserError(
            "Only moving averages that the optimizer keeps of weights and tables can be in eight bits.",
            seen=f"`{left[0]}` with {run.optimizer.kind}, which keeps none of it",
            where="precision.moments",
            fix="leave it out, or name a part of a weight; adafactor keeps an average with --optimizer.beta1 0.9",
        )


def fast_microbatches(run: Run, layout: Layout, model: Any) -> int:
    """Microbatches for a run that does not say how many: one on an accelerator.

    On a CPU a step is faster the less new memory it takes and the more of that stays in the caches: by 5 to 10 % with
    parts of about 1,024 float32 tokens a device (docs/cpu-speed.md). It is also one if devices only rehearse a larger
    machine, in a pipeline (which has parts of its own), for experts whose shares would cost another forward pass, and
    with dropout, which is drawn for each part: a run on another mesh, with other parts, would drop other numbers.

    Args:
        run: the run.
        layout: its layout on devices.
        model: the model, or its types.
    """
    ways = lambda name: math.prod(layout.mesh.shape[axis] for axis in layout.assign((name,))[0])
    computes = are_cpus(layout.mesh) and not rehearses(layout.mesh)
    if not computes or run.mesh.stage != 1 or model.looks_ahead or dropout(run.model):
        return 1
    rows = math.gcd(*(entry.size for entry in run.batch_sizes())) // ways("batch")
    wanted = rows * run.data.sequence_length * jnp.dtype(run.precision.compute).itemsize / _PART_BYTES
    divisors = sorted({d for n in range(1, math.isqrt(rows) + 1) if rows % n == 0 for d in (n, rows // n)})
    return min(divisors, key=lambda n: abs(math.log(n / wanted)), default=1)


def keep_of(remat: Remat) -> Keep | None:
    """What a run's checkpointing keeps for the backward pass."""
    match remat.policy:
        case "none":
            return None
        case "full":
            return nothing
        case "dots":
            return products
        case "saved":
            return Keep(names=remat.names) if remat.names else saved
        case "offload":
            return Keep(names=(), offload=remat.names or None)


def vocab_multiple(layout: Layout) -> int:
    """The number whose multiple the vocabulary is padded to: the devices that slice it, at rest or in use.

    On TPUs each device's slice is whole rows of tiles (8 by 128), so that gathered slices need no copy: for the tables
    of an 8B model over 256 devices that is a gigabyte.
    """
    slices = [layout.assign(("vocab", "embed"), which)[0] for which in ("params", "compute")]
    if set(layout.even().assign(("layers",))[0]) & set(slices[1]):  # each stage slices what it has at rest
        slices.append(tuple({*slices[0], *slices[1]}))
    ways = math.lcm(*(math.prod(layout.mesh.shape[axis] for axis in axes) for axes in slices))
    return ways * rows_of_a_tile(layout.mesh) if ways > 1 else ways


def _placed(shapes: TrainState, layout: Layout) -> TrainState:
    """The state's types with shardings on the layout's devices.

    In explicit mode the types give the shardings; if the compiler places arrays, the layout gives those of parameters.
    """

    def leaf(x: Any) -> Any:
        array = x.array if is_named(x) else x
        own = getattr(array, "sharding", None)
        if isinstance(own, NamedSharding) and mode_of(layout.mesh) == "explicit":
            sharding = NamedSharding(layout.mesh, own.spec)
        else:
            sharding = layout.sharding(x.names if is_named(x) else (None,) * len(array.shape), "params")
        placed = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return x.with_array(placed) if is_named(x) else placed

    return jax.tree.map(leaf, shapes, is_leaf=is_named)
