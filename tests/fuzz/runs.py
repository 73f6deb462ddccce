"""`python -m tests.fuzz.runs`: random runs, three steps of each on a mesh as on one device.

A run is drawn as a user would write it: a family, sizes of mesh axes, a preset and entries of its own, a way for
attention and for experts, parts side by side, numbers that tokens travel in, stages, microbatches, checkpointing, an
optimizer, narrow products. Either the loss and the gradient norm of every step equal one device's, where experts are
computed by their definition, and what the optimizer keeps after the first step, each parameter's by itself, and the
compiled program matches its ledger as the trainer demands; or an error of ours refuses it.
"""

import argparse
import dataclasses
import functools
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

import conftest  # noqa: F401  before anything imports JAX: eight CPU devices, the tests' strictness and their compiler
from tests.equivalence.test_steps import batch, put
from tests.fuzz.proving import hardware
from tests.models.small import CONFIGS
from trellis.data.batch import Batch
from trellis.errors import TrellisError
from trellis.hardware.chips import target
from trellis.inspect import structure_of
from trellis.inspect.ledger import ledger_of
from trellis.mesh.platform import leave_threads
from trellis.models import ModelConfig, Routing
from trellis.nn import Precision
from trellis.nn.moe.config import EXPERT_WEIGHTS, FAR_ROWS
from trellis.optim.config import Adafactor, AdamW, Lion, Muon
from trellis.proof.runs import prove_run
from trellis.recipes import tiny
from trellis.run.config import Remat, Run
from trellis.run.layouts import AXES, LayoutChoice, MeshSizes
from trellis.train.assemble import Assembled, assemble
from trellis.train.checks import check_marks
from trellis.train.compilation import CompiledStep
from trellis.train.summary import step_program

STEPS = 3
# How often a mesh axis is drawn: experts' where there are experts, and otherwise as often as one meets them.
_SHARE = {"replica": 1, "stage": 2, "data": 3, "data_y": 1, "data_z": 1, "context": 2, "context_y": 1, "model": 3}
_OWN_PARAMS = ("embed", "mlp", "vocab", "heads", "kv_heads", "head_dim", "layers")
_OWN_COMPUTE = ("batch", "pos", "embed", "mlp", "vocab", "heads", "kv_heads", "head_dim")
_WAYS = ("auto", "auto", "dense", "grouped", "gather", "ragged", "slots", "hierarchical", "hierarchical")
# What is kept by name: of dense families, and of mixtures.
_KEPT, _KEPT_OF_EXPERTS = ("attention", "mlp"), ("attention", "mlp_rows", EXPERT_WEIGHTS, FAR_ROWS)
# Of the loss of a step, of its gradient norm as a share of it, and of what the optimizer keeps of a parameter as a
# share of that. Where products are rounded to eight bits, partial sums are rounded on each device; what the compiler
# places, it sums in an order of its own.
_NEAR, _NEAR_NARROW = (1e-4, 2e-3, 2e-3), (2e-2, 1e-1, 0.5)
# A gradient that is a smaller share of all parameters' is noise: that of a bias which every key has, for one.
_NOISE = 1e-5


class Found(NamedTuple):
    """What came of a run: `right`, `refused`, `wrong` or `error`, and how far apart or why; also `elsewhere` and
    `unsteady` of one that is proven for another chip."""

    what: str
    why: str


# How many devices a run is for, the lengths of its sequences and its batch sizes: of up to eight devices, and of more,
# where loops over devices are no longer written out and tables of devices are long.
_FEW = ((2, 3, 4, 4, 6, 8, 8, 8), (16, 16, 24, 32), (8, 12, 16, 16, 24))
_MANY = ((9, 12, 12, 16, 16, 18, 24), (48, 96, 144, 288), (12, 16, 24, 48))


def draw(seed: int, many: bool = False) -> tuple[Run, int]:
    """A run, and the devices that it is for.

    Args:
        seed: what to draw from.
        many: whether it is for nine devices or more.

    Raises:
        TrellisError: it is not a run.
    """
    r = random.Random(seed)
    model = _model(r)
    counts, lengths, batch_sizes = _MANY if many else _FEW
    count = r.choice(counts)
    mesh = mesh_sizes(r, count, hasattr(model, "experts") and model.experts > 1)
    some = lambda share, value: value if r.random() < share else None
    likely = lambda holds: r.random() < (0.9 if holds else 0.05)  # most runs are to run
    mode = "explicit" if r.random() < 0.8 or not likely(mesh["stage"] == 1) else "auto"
    overlap = likely(mode == "explicit" and mesh["model"] > 1) and some(0.3, r.choice((1, 2)))
    own_axes = (*AXES, "data/model", "model/data", "")
    layout = {
        "preset": r.choice(["auto"] * 8 + ["hybrid"] * 4 + ["data", "fsdp", "expert", "tensor", "context"]),
        "context": r.choice(("ring", "ring", "gather", "exchange")),
        "mode": mode,
        "gather": r.choice(("joint", "per_axis")),
        "overlap": tuple(r.sample(("mlp", "heads"), overlap or 0)),
        "pipeline_microbatches": some(0.6, r.choice((1, 2, 3, 4, 8))) if mesh["stage"] > 1 else None,
        "pipeline_groups": some(0.3, 2) or 1 if mesh["stage"] > 1 else 1,
        "context_y": some(0.6, r.choice(("ring", "gather", "exchange"))) if mesh["context_y"] > 1 else None,
        "params": some(0.3, {r.choice(_OWN_PARAMS): r.choice(own_axes)}) or {},
        "compute": some(0.3, {r.choice(_OWN_COMPUTE): r.choice(own_axes)}) or {},
    }
    experts = hasattr(model, "routing")
    narrow = ("mlp", "attention", "vocab", *(["experts", "experts"] if experts else []))
    products = some(0.12, {r.choice(narrow): r.choice(("fp8", "int8", "mxfp8"))}) or {}
    history = r.choice((0, 2)) if set(products.values()) & {"fp8", "int8"} else 0
    microbatches = r.choice((None, 1, 2, 3, 4))
    moments = some(0.1, {r.choice(("mlp", "attention", "embedding")): "mxfp8"}) or {}
    rate = r.choice((AdamW, AdamW, Lion, Muon, Adafactor))(learning_rate=1e-3)
    base = tiny()
    data = {"sequence_length": r.choice(lengths), "mask_documents": r.random() < 0.6}
    batch_size = r.choice(batch_sizes)
    if microbatches and likely(True):
        microbatches = r.choice([parts for parts in (1, 2, 3, 4) if batch_size % (parts * count) == 0] or [1])
    several = (microbatches or 1) > 1 or mesh["stage"] > 1
    run = dataclasses.replace(
        base,
        model=model,
        batch_size=batch_size,
        data=dataclasses.replace(base.data, **data),
        optimizer=rate,
        microbatches=microbatches,
        accumulation=r.choice(("pending", "sharded")) if several else "pending",
        z_loss=r.choice((0.0, 1e-4)),
        clip_norm=r.choice((None, 1.0)),
        ema=r.choice((None, None, 0.9)),
        remat=_remat(r, experts, likely(mesh["stage"] == 1)),
        precision=Precision(compute="float32", products=products, amax_history=history, moments=moments),
        mesh=MeshSizes(**mesh),
        layout=LayoutChoice(**layout),
    )
    return run, count


def _model(r: random.Random) -> ModelConfig:
    model = CONFIGS[r.choice(sorted(CONFIGS))]
    if hasattr(model, "routing"):
        drawn = {"way": r.choice(_WAYS), "slack": r.choice((0.5, 1.5, 3.0))}
        drawn |= {"interleave": r.choice((1, 1, 1, 2)), "dispatch": r.choice((None, None, None, "bits", "mxfp8"))}
        model = dataclasses.replace(model, routing=dataclasses.replace(model.routing, **drawn))
    return dataclasses.replace(model, layers=r.choice((2, 3, 4, 5))) if r.random() < 0.4 else model


def _remat(r: random.Random, experts: bool, offload: bool) -> Remat:
    policy = r.choice(("none", "full", "saved", "dots", *(["offload"] if offload else [])))
    if policy not in ("saved", "offload") or r.random() < 0.6:
        return Remat(policy=policy)
    known = _KEPT_OF_EXPERTS if experts else _KEPT
    return Remat(policy=policy, names=tuple(r.sample(known, r.randint(1, len(known)))))


def mesh_sizes(r: random.Random, count: int, experts: bool) -> dict[str, int]:
    """Sizes of the mesh axes, prime factor by prime factor."""
    shares = _SHARE | ({"expert": 3, "expert_y": 2} if experts else {"expert": 0.5})
    sizes = dict.fromkeys(AXES, 1)
    while count > 1:
        prime = next(p for p in (2, 3) if count % p == 0)
        (axis,) = r.choices([*shares], [*shares.values()])
        sizes[axis], count = sizes[axis] * prime, count // prime
    return sizes


def judge(seed: int, many: bool = False) -> Found:
    """A run that a seed stands for, held against one device."""
    try:
        run, count = draw(seed, many)
        made = assemble(run, jax.devices()[:count])
        program = step_program(made)
        check_marks(run, program)
    except TrellisError as error:
        return Found("refused", _rule(error))
    whole = {"mesh": MeshSizes(data=1), "layout": LayoutChoice(preset="single")}
    plain = {"accumulation": "pending", "remat": Remat(policy="none"), "microbatches": 1, "model": _defined(run.model)}
    alone = assemble(dataclasses.replace(run, **whole, **plain), jax.devices()[:1])
    with alone.layout:
        first = jax.device_get(dataclasses.replace(alone.init(), key=None))
    wanted, kept, _ = _curve(alone, first)
    try:
        found, keeps, compiled = _curve(made, first)
        structure = structure_of(ledger_of(program), compiled, made.layout.mesh)
    except TrellisError as error:
        return Found("refused", _rule(error))
    loss, norm = np.abs(found - wanted)[:, 0].max(), (np.abs(found - wanted) / wanted)[:, 1].max()
    name, share = _farthest(keeps, kept)
    rounded = run.precision.is_narrow or getattr(run.model, "routing", Routing()).dispatch == "mxfp8"
    near = _NEAR_NARROW if rounded else _NEAR
    right = all(have <= most for have, most in zip((loss, norm, share), near, strict=True))
    why = f"loss apart by {loss:.1e}, gradient norm by {norm:.1e} of itself, {name} by {share:.1e}"
    if structure.faults:  # those that are not certain a run tells, and goes on
        why = f"{why}; {len(structure.faults)} of structure: {structure.faults[0]}"
    return Found("right" if right and not structure.certain else "wrong", why)


def proven(seed: int, chip: str, many: bool = False) -> Found:
    """A run that a seed stands for, compiled for hardware that is not here, executed, and held against one device."""
    try:
        run, count = draw(seed, many)
        if (on := hardware(chip, count)) is None:
            return Found("elsewhere", f"there is no slice of {count} devices")
        proof = prove_run(run, target(on), explain=False)
    except TrellisError as error:
        return Found("refused", _rule(error))
    if proof.between:
        return Found("unsteady", "in all draws some token is tied between two experts")
    right = proof.proven and not proof.structure.certain
    return Found("right" if right else "wrong", f"{proof.error:.1e} on {on}" if right else str(proof))


def _defined(model: ModelConfig) -> ModelConfig:
    """The same model, all of whose experts are computed for all tokens, together."""
    if not hasattr(model, "routing"):
        return model
    return dataclasses.replace(model, routing=dataclasses.replace(model.routing, way="dense", interleave=1))


def _farthest(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> tuple[str, float]:
    """Which of what two optimizers keep is farthest apart, as a share of itself; zeros at the end of a padded
    vocabulary are left out."""
    length = np.linalg.norm
    shares = {}
    for name, x in found.items():
        like = wanted[name]
        both = tuple(slice(0, min(sizes)) for sizes in zip(x.shape, like.shape, strict=True))
        most = max(length(other) for each, other in wanted.items() if each.split(".")[:2] == name.split(".")[:2])
        shares[name] = length(x[both] - like[both]) / max(length(like), _NOISE * most, 1e-30)
    return max(shares.items(), key=lambda each: each[1])


def _curve(made: Assembled, first) -> tuple[np.ndarray, dict[str, np.ndarray], Any]:
    """Loss and gradient norm of the first steps, from a state on the host; what the optimizer keeps after the first of
    them; and the compiled program."""
    like = jax.tree.structure(dataclasses.replace(made.abstract, key=None))  # its experts may be reached otherwise
    first = jax.tree.unflatten(like, jax.tree.leaves(first))
    step, found, data = CompiledStep(made.step), [], made.run.data
    size = made.run.batch_sizes()[0].size, data.sequence_length, 2 if data.mask_documents else 1
    with made.layout:
        state = put(first, made.abstract)
        for index in range(STEPS):
            state, metrics = step(state, Batch(**jax.device_put(batch(index, *size), made.batch_sharding)))
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
            if index == 0:
                leaves, _ = jax.tree.flatten_with_path(state.optimizer)
                kept = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves if x.dtype == np.float32}
    return np.array(found), kept, step.programs[0]


def _rule(error: TrellisError) -> str:
    return " | ".join(line.strip() for line in str(error).splitlines()[:2])[:200]


def told(seeds: Iterable[int], judge: Callable[[int], Found], draw: Callable[[int], object]) -> int:
    """Judges what seeds stand for and prints what comes of each; of what is wrong, also what was drawn. The exit
    status."""
    counts = Counter()
    for seed in seeds:
        begin = time.monotonic()
        try:
            found = judge(seed)
        except Exception as error:
            traceback.print_exc()
            found = Found("error", f"{type(error).__name__}: {error!s:.200}")
        counts[found.what] += 1
        print(f"seed {seed}: {found.what} in {time.monotonic() - begin:.0f} s: {found.why}", flush=True)
        if found.what in ("wrong", "error"):
            print(f"    {draw(seed)}", flush=True)
        jax.clear_caches()
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return 1 if counts["wrong"] or counts["error"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.runs", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many runs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; a seed is one run")
    parser.add_argument("--many", action="store_true", help="on 9 to 24 devices, instead of up to 8")
    parser.add_argument("--on", default="", help="compiled for this chip, and executed by `prove`: v5e, H100, ...")
    options = parser.parse_args()
    if options.many:
        jax.config.update("jax_num_cpu_devices", max(_MANY[0]))
        leave_threads(max(_MANY[0]))
    found = lambda seed: proven(seed, options.on, options.many) if options.on else judge(seed, options.many)
    seeds = range(options.seed, options.seed + options.count)
    return told(seeds, found, functools.partial(draw, many=options.many))


if __name__ == "__main__":
    sys.exit(main())
