"""The plain program on one device: a run's own step, in float32, by JAX on this machine's CPU.

Its state is not the one that training starts from, in which many arrays are zeros or ones and would hide mistakes.
Parameters are moved away from these, moments come from a step that was made before, and the step's number is in the
middle of the run. Batches have two documents a row, and some tokens do not count. No token is so evenly between two
experts that rounding decides.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from trellis.data.batch import Batch
from trellis.hardware.platform import devices_of_jax
from trellis.proof.placing import numbers_of, plain
from trellis.run.config import Precision, Run
from trellis.run.layouts import LayoutChoice, MeshSizes
from trellis.train.assemble import Assembled, assemble
from trellis.train.state import TrainState

# The share of itself that a parameter is moved by: results of right programs deviate by about as much.
_NUDGE = 2e-6
# A token that goes to another expert moves a gradient by more than this share of its largest entry.
_FLIPPED = 1e-4
# How often numbers are drawn until no token stands between two experts.
_DRAWS = 6


@dataclasses.dataclass(frozen=True)
class Reference:
    """A step made on one device.

    Attributes:
        given: the state and the batch, flat, as numpy arrays.
        results: the new state and the metrics, likewise.
        before: for each of the results, the state's array that it replaces, or None.
        names: of the results, by their paths.
        between: whether in all numbers that were drawn a token stands between two experts, so that rounding decides.
    """

    given: list[np.ndarray]
    results: list[np.ndarray]
    before: list[np.ndarray | None]
    names: list[str]
    between: bool = False


def on_one_device(run: Run, *, padding: int, seed: int = 0) -> Reference:
    """Makes one step of a run.

    Args:
        run: the run, of small sizes.
        padding: what its vocabulary is padded to a multiple of where it is compared with.
        seed: of all numbers.
    """
    plainly = dataclasses.replace(
        run,
        mesh=MeshSizes(data=1),
        layout=LayoutChoice(preset="single"),
        precision=Precision(params="float32", compute="float32"),
        microbatches=run.parts,
        accumulation="pending",
    )
    random = numbers_of(seed)
    mixture = run.model.experts > 1
    with jax.default_device(devices_of_jax("cpu")[0]):
        # Its metrics are those of the run's step.
        names = run.precision.is_narrow
        made = assemble(plainly, devices_of_jax("cpu")[:1], padding=padding, names_tensors=names)
        with made.layout:
            state = _moved_model(jax.tree.map(plain, made.init()), random)
            first, _ = _step(made, state, _batch(made, random))
            for _ in range(_DRAWS if mixture else 1):
                state, batch = _in_the_middle(first, run, random), _batch(made, random)
                new = _step(made, state, batch)
                between = mixture and _between_experts(made, state, batch, new)
                if not between:
                    break
    given, results = jax.tree.leaves((state, batch)), jax.tree.leaves(new)
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(new)]
    before = [*jax.tree.leaves(state), *[None] * (len(results) - len(jax.tree.leaves(state)))]
    return Reference(given, results, before, names, between)


def _name(path: tuple) -> str:
    """`model.layers.block.attention.q`, from a path in the pair of a state and metrics."""
    return jax.tree_util.keystr(path[1:], simple=True, separator=".").removesuffix(".array")


def _step(made: Assembled, state: TrainState, batch: Batch) -> tuple[Any, Any]:
    """A step on arrays of numpy."""

    def put(x: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.wrap_key_data(x), like.sharding)
        return jax.device_put(x, like.sharding)

    given = jax.tree.map(put, (state, batch), (made.abstract, made.abstract_batch()))
    return jax.tree.map(plain, made.step(*given))


def _between_experts(made: Assembled, state: TrainState, batch: Batch, new: tuple[TrainState, Any]) -> bool:
    """Whether a token stands between two experts, so that rounding decides which of them it goes to.

    Two right programs may then give gradients that are far apart, and so do two steps whose parameters differ by less
    than programs may.
    """
    random = np.random.default_rng(0)
    by = jax.tree.map(lambda x: _NUDGE * random.choice(np.float32([-1, 1]), x.shape) * x, state.model)
    for way in (by, jax.tree.map(np.negative, by)):
        model = jax.tree.map(lambda x, by: (x + by).astype(x.dtype), state.model, way)
        moved = _step(made, dataclasses.replace(state, model=model), batch)
        pairs = zip(*(jax.tree.leaves(one[0].optimizer) for one in (moved, new)), strict=True)
        if any(np.abs(a - b).max() > _FLIPPED * np.abs(b).max() for a, b in pairs if b.dtype.kind == "f"):
            return True
    return False


def _moved_model(state: TrainState, random: np.random.Generator) -> TrainState:
    """Parameters without special values: all get noise, and what is constant gets random signs."""

    def moved(x: np.ndarray) -> np.ndarray:
        noise = 0.02 * random.normal(size=x.shape).astype(np.float32)
        constant = x.size > 1 and (x == x.flat[0]).all()
        return x * random.choice(np.float32([-1, 1]), size=x.shape) + noise if constant else x + noise

    return dataclasses.replace(state, model=jax.tree.map(moved, state.model))


def _in_the_middle(state: TrainState, run: Run, random: np.random.Generator) -> TrainState:
    """A state as after half of the run: counts of steps say so, and no moment is nearly zero.

    Squares, which have no negative entries, are raised by about their mean, so that what is divided by their root is
    no ratio of two roundings.
    """

    def moved(x: np.ndarray) -> np.ndarray:
        if x.dtype == np.int32 and x.ndim == 0:
            return np.asarray(max(run.steps // 2, 1), np.int32)
        if x.dtype.kind != "f" or not x.ndim:
            return x
        size = max(float(np.abs(x).mean()), 1e-12)
        if (x >= 0).all():
            return x + (size * random.uniform(0.5, 1.5, x.shape)).astype(np.float32)
        return x + (0.1 * size * random.normal(size=x.shape)).astype(np.float32)

    parts = {name: jax.tree.map(moved, getattr(state, name)) for name in ("step", "optimizer", "average")}
    return dataclasses.replace(state, **parts)


def _batch(made: Assembled, random: np.random.Generator) -> Batch:
    """Rows of two documents each; some tokens do not count."""
    like = made.abstract_batch()
    rows, length = like.shape
    tokens, targets = random.integers(0, made.run.model.vocab, (2, rows, length)).astype(np.int32)
    mask = (random.random((rows, length)) < 0.8).astype(np.float32)
    cuts = random.integers(length // 5 + 1, length - length // 5, (rows, 1))
    places = np.arange(length)[None]
    second = places >= cuts
    batch = Batch(
        tokens=tokens,
        targets=targets,
        loss_mask=mask,
        segment_ids=(second + 1).astype(np.int32),
        positions=np.where(second, places - cuts, places).astype(np.int32),
    )
    return batch if like.segment_ids is not None else batch.without_documents()
