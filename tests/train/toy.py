"""A small training program that has all a large one has: a mesh, momentum, a random key, dropout, data by step.

Run as a program it trains in a folder and prints its last line of metrics:

    python -m tests.train.toy FOLDER --steps 40
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from trellis.mesh import Layout
from trellis.optim.config import Constant
from trellis.recipes import tiny
from trellis.run.config import CheckpointRule, DeadlineRule, Evaluation, Logging, Run
from trellis.train.assemble import Assembled
from trellis.train.loop import Feed, train
from trellis.train.step import StepOptions

ROWS, WIDTH = 16, 64


def mesh_of(data: int, model: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=devices)


def run_of(steps: int, every: int | None = None, **changes) -> Run:
    """A run of so many steps that logs every one of them; what else it says is for other models."""
    rules = {"checkpoints": CheckpointRule(every=every, keep_latest=9), "logging": Logging(every=1), **changes}
    return dataclasses.replace(tiny(), steps=steps, schedule=Constant(warmup_steps=0), **rules)


def toy(
    mesh: jax.sharding.Mesh,
    run: Run,
    *,
    pause: float = 0.0,
    spoil_at: int | None = None,
    whole: bool = False,
    stick_at: int | None = None,
    prompt_at: int | None = None,
) -> tuple[Assembled, Feed]:
    """Fits a two-layer network to a fixed function.

    Args:
        pause: seconds before each batch.
        spoil_at: the step of this index has a loss that is no number.
        whole: every device keeps all parameters.
        stick_at: the batch of this index does not come.
        prompt_at: no token of the step of this index counts.
    """
    specs = {"w1": P(), "w2": P()} if whole else {"w1": P("data", "model"), "w2": P("model", "data")}
    at = lambda spec: NamedSharding(mesh, spec)
    shardings = {"params": {k: at(s) for k, s in specs.items()}, "velocity": {k: at(s) for k, s in specs.items()}}
    shardings = {**shardings, "key": at(P()), "step": at(P())}

    def make():
        first, second, key = jax.random.split(jax.random.key(0), 3)
        params = {
            "w1": jax.random.normal(first, (WIDTH, WIDTH)) / 8,
            "w2": jax.random.normal(second, (WIDTH, WIDTH)) / 8,
        }
        return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params), "key": key, "step": jnp.int32(0)}

    def loss_of(params, x, key):
        w1 = jax.reshard(params["w1"], P(None, "model"))
        w2 = jax.reshard(params["w2"], P("model", None))
        hidden = jnp.tanh(jnp.matmul(x, w1))
        kept = jax.random.bernoulli(key, 0.9, hidden.shape, out_sharding=P("data", "model"))
        hidden = hidden * kept.astype(jnp.float32)
        out = jnp.matmul(hidden, w2, out_sharding=P("data", None))
        return jnp.mean((out - jnp.sin(3 * x)) ** 2)

    def step(state, x):
        key = jax.random.fold_in(state["key"], state["step"])
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x, key)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
        params = jax.tree.map(lambda p, v: p - 0.05 * v, state["params"], velocity)
        if spoil_at is not None:
            loss = jnp.where(state["step"] >= spoil_at, jnp.nan, loss)
        tokens = jnp.where(state["step"] == (-1 if prompt_at is None else prompt_at), 0.0, ROWS)
        loss = jnp.where(tokens == 0, jnp.nan, loss)
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": jnp.float32(0.05), "tokens": tokens}
        return {"params": params, "velocity": velocity, "key": state["key"], "step": state["step"] + 1}, metrics

    def batch(index):
        whole = np.random.default_rng([7, index]).standard_normal((ROWS, WIDTH), dtype=np.float32)
        return jax.make_array_from_callback(whole.shape, at(P("data", None)), lambda part: whole[part])

    def batches(start):
        index = start
        while True:
            time.sleep(pause if index != stick_at else 1000)
            yield index, batch(index)
            index += 1

    fixed = batch(10**6)

    @jax.jit
    def measure(params, x):
        return {"validation_loss": loss_of(params, x, jax.random.key(1))}

    init = jax.jit(make, out_shardings=shardings)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), jax.eval_shape(make), shardings
    )
    assembled = Assembled(
        run=run,
        layout=Layout(mesh),
        optimizer=optax.identity(),
        options=StepOptions(),
        init=init,
        abstract=abstract,
        step=jax.jit(step, donate_argnums=0),
    )
    feed = Feed(
        batches=batches,
        evaluate=lambda state, _: measure(state["params"], fixed),
        sample=lambda state: f"a sample after {int(state['step'])} steps",
    )
    return assembled, feed


def _delayed(function: Callable, seconds: float) -> Callable:
    return lambda *given, **named: (time.sleep(seconds), function(*given, **named))[1]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--model", type=int, default=2)
    parser.add_argument("--spoil-at", type=int)
    parser.add_argument("--stick-at", type=int)
    parser.add_argument("--slow-disk", type=float, help="seconds that each file takes to be synced or renamed")
    parser.add_argument("--deadline", type=float, default=600, help="the least deadline, in seconds")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    if args.slow_disk:
        for name in ("fsync", "rename", "replace"):
            setattr(os, name, _delayed(getattr(os, name), args.slow_disk))
    from trellis.errors import UserError
    from trellis.train.compilation import use_persistent_cache
    from trellis.train.distributed import initialize

    use_persistent_cache(f"{args.folder}/compiled")
    several = {"coordinator": args.coordinator, "processes": args.processes, "process": args.process}
    initialize(**several, heartbeat_seconds=10)
    mesh = mesh_of(args.data, args.model)
    run = run_of(args.steps, checkpoints=CheckpointRule(every=args.every), evaluation=Evaluation(every=10))
    run = dataclasses.replace(run, deadline=DeadlineRule(seconds=args.deadline))
    how = {"pause": args.pause, "spoil_at": args.spoil_at, "stick_at": args.stick_at}
    try:
        with jax.set_mesh(mesh):
            outcome = train(*toy(mesh, run, **how), args.folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(outcome.lines[-1]))
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
