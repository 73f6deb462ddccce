"""Is what the accelerator computes right? Held against float32 on the CPU of the same machine."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from random_batch import random_batch
from timing import products_dtype

import trellis as tr
from trellis import nn
from trellis.inspect import collectives, compare
from trellis.nn import AttentionError, dot_product_attention
from trellis.recipes import load_run
from trellis.train import CompiledStep, assemble

WORKS = ("check_attention", "check_loss", "check_step", "check_repeat", "check_ledger")

# Largest differences, as a share of the largest value: rounding to eight bits at several places.
KERNEL_ERROR = 0.02
# Of a loss and of a gradient's norm, relative, after up to three updates.
LOSS_ERROR, NORM_ERROR = 0.01, 0.03
# Kinds of narrow products that are tried.
NARROW = ("fp8",)
# What to try on each platform besides the formula that it is held against.
ATTENTION = {"gpu": ("cudnn", "chunked"), "tpu": ("splash", "chunked"), "cpu": ("chunked",)}


def check_attention(findings: Any, *, batch: int, pos: int, head_dims: tuple[int, ...]) -> None:
    """Results and gradients of attention: grouped heads, a window, documents."""
    device, host, worst = jax.devices()[0], jax.devices("cpu")[0], {}
    documents = jnp.asarray(np.arange(pos)[None] * 3 // pos + np.zeros((batch, 1)), jnp.int32)
    masks = {"causal": {}, "window": {"window": pos // 4}, "documents": {"segment_ids": (documents, documents)}}
    for head_dim in head_dims:
        keys = jax.random.split(jax.random.key(head_dim), 4)
        sizes = [(batch, pos, heads, head_dim) for heads in (4, 2, 2, 4)]
        arrays = [jax.random.normal(key, size).astype(products_dtype()) for key, size in zip(keys, sizes)]
        for mask, options in masks.items():
            right = _attention(host, "reference", [a.astype(jnp.float32) for a in arrays], options)
            for implementation in ATTENTION[device.platform]:
                case = f"{implementation}, {mask}, head_dim {head_dim}"
                try:
                    got = _attention(device, implementation, arrays, options)
                except AttentionError as refused:
                    findings.tell(refused=[*findings.values.get("refused", []), f"{case}: {refused}"])
                    continue
                for what, one, other in zip(("out", "d q", "d k", "d v"), got, right):
                    worst[f"{case}, {what}"] = difference(one, other)
    findings.tell(errors=worst)
    hold(findings, {name: (error, KERNEL_ERROR) for name, error in worst.items()})


def _attention(device, implementation: str, arrays: list, options: dict) -> list:
    """The result and the gradients of its product with the last array."""
    q, k, v, weights = jax.device_put(arrays, device)
    options = jax.device_put(options, device) if "segment_ids" in options else options

    def weighted(q, k, v):
        out = dot_product_attention(q, k, v, implementation=implementation, **options)
        return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return [out, *gradients]


def check_loss(findings: Any, *, tokens: int, embed: int, vocab: int) -> None:
    """The loss of a product with the unembedding, and its gradients."""
    device, host = jax.devices()[0], jax.devices("cpu")[0]
    x = jax.random.normal(jax.random.key(0), (2, tokens // 2, embed)).astype(jnp.bfloat16)
    table = (jax.random.normal(jax.random.key(1), (vocab, embed)) * embed**-0.5).astype(jnp.bfloat16)
    targets = jax.random.randint(jax.random.key(2), (2, tokens // 2), 0, vocab)

    def loss(x, table, targets):
        return nn.linear_cross_entropy(x, table, targets, vocab_first=True).total / targets.size

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    got = run(*jax.device_put((x, table, targets), device))
    right = run(*jax.device_put((x.astype(jnp.float32), table.astype(jnp.float32), targets), host))
    errors = {
        name: difference(one, other)
        for name, one, other in zip(("loss", "d x", "d table"), jax.tree.leaves(got), jax.tree.leaves(right))
    }
    findings.tell(errors=errors)
    hold(findings, {name: (error, KERNEL_ERROR) for name, error in errors.items()})


def check_step(findings: Any, *, recipe: str, options: dict, types: tuple[str, ...]) -> None:
    """Losses and gradient norms of three steps, against those of the CPU in float32.

    Args:
        findings: where it goes.
        recipe, options: the run.
        types: of all products, or of the MLP's and attention's alone if it is a narrow one; the CPU's are then, too.
    """
    run, errors = load_run(recipe, options), {}
    right = functools.cache(lambda compute: _losses(run, compute, jax.devices("cpu")[:1]))
    for compute in types:
        held, got = right(compute if compute in NARROW else "float32"), _losses(run, compute, jax.devices()[:1])
        for step, (one, other) in enumerate(zip(got, held), 1):
            for what, a, b, limit in zip(("loss", "grad norm"), one, other, (LOSS_ERROR, NORM_ERROR)):
                errors[f"{compute}, {what} {step}"] = abs(a - b) / abs(b), limit
        findings.tell(losses=[loss for loss, _ in held], errors={name: error for name, (error, _) in errors.items()})
    hold(findings, errors)


def _losses(run: Any, compute: str, devices: list) -> list[tuple[float, float]]:
    """Loss and gradient norm of three steps on one batch."""
    made = assemble(dataclasses.replace(run, precision=_precision(compute)), devices)
    with made.layout:
        state, batch, found = made.init(), random_batch(made), []
        for _ in range(3):
            state, metrics = made.step(state, batch)
            found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return found


def _precision(compute: str) -> nn.Precision:
    if compute not in NARROW:
        return nn.Precision(compute=compute)
    return nn.Precision(compute=products_dtype(), products={"mlp": compute, "attention": compute})


def check_repeat(findings: Any, *, recipe: str, options: dict, steps: int = 3) -> None:
    """Whether a few steps made twice from one state end in the same bits."""
    made = assemble(load_run(recipe, options), jax.devices()[:1])
    with made.layout:
        batch, ends = random_batch(made), []
        program = CompiledStep(made.step, made.compiler_options)
        for _ in range(2):
            state = made.init()
            for _ in range(steps):
                state, metrics = program(state, batch)
            ends.append(jax.tree_util.tree_leaves_with_path(jax.tree.map(_numbers, (state, metrics))))
    differ = [jax.tree_util.keystr(path) for (path, a), (_, b) in zip(*ends) if a.tobytes() != b.tobytes()]
    findings.tell(arrays=len(ends[0]), differ=differ)
    if differ:
        raise AssertionError(f"{len(differ)} of {len(ends[0])} arrays have other bits: {', '.join(differ[:3])}")
    findings.tell(said=f"all {len(ends[0])} arrays have the same bits after {steps} steps made twice")


def _numbers(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def check_ledger(findings: Any, *, recipe: str, options: dict) -> None:
    """What the compiled step sends, against the ledger: on one device nothing may be sent."""
    devices = jax.devices()
    made = assemble(load_run(recipe, options), devices)
    with made.layout:
        state, batch = made.abstract, made.abstract_batch()
        predicted = tr.ledger(made.step, state, batch)
        compiled = made.step.lower(state, batch).compile()
    found = collectives(compiled, made.layout.mesh)
    comparison = compare(predicted, found, scatter_as_reduce=devices[0].platform == "cpu")
    sent = {axis: list(both) for axis, both in comparison.axes.items()}
    findings.tell(devices=len(devices), sent=sent)
    hold(findings, {f"bytes along {axis}": (abs(b - a) / max(a, b), 0.01) for axis, (a, b) in sent.items()})


def difference(one: jax.Array, other: jax.Array) -> float:
    """The largest difference over the largest value."""
    one, other = (np.asarray(x, np.float32) for x in (one, other))
    return float(np.abs(one - other).max() / np.abs(other).max())


def hold(findings: Any, errors: dict[str, tuple[float, float]]) -> None:
    """Ends the row as failed where an error is above its limit, or is not a number."""
    wrong = [f"{name} is off by {error:.2%} (limit {limit:.0%})" for name, (error, limit) in errors.items()
             if not error <= limit]  # fmt: skip
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(errors)} comparisons fail: {'; '.join(wrong[:3])}")
    worst = max(errors, key=lambda name: errors[name][0], default=None)
    held = f"{len(errors)} comparisons hold"
    findings.tell(said=f"{held}, the worst {worst}: {errors[worst][0]:.2%}" if worst else f"{held}: nothing is sent")
