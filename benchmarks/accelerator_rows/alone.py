"""The machine's own rates, and attention and the loss alone, each against what its operations take at least."""

import contextlib
import subprocess
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from process import Missing
from timing import products_dtype, seconds_of

from trellis.nn import dot_product_attention, linear_cross_entropy
from trellis.plan import Chip, local_target

WORKS = ("machine", "attention_alone", "loss_alone")

PACKAGES = (
    "trellis",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-cudnn-cu13",
    "libtpu",
    "torch",
)
QUERY = ("driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.sm", "temperature.gpu")


def machine(findings: Any, *, size: int, megabytes: int, cpu_too: bool, at_least: float) -> None:
    """What the device is, and what products and copies alone reach on it, each measured for so many seconds."""
    device = jax.devices()[0]
    if device.platform == "cpu" and not cpu_too:
        raise Missing("JAX finds no accelerator here; `trellis doctor` says more, and --toy rehearses on a CPU")
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    findings.tell(device=device.device_kind, devices=len(jax.devices()), versions=versions, driver=_driver())
    square = jax.jit(lambda a, b: a @ b)
    products = {}
    for dtype in ("bfloat16", "float32"):
        a, b = (jax.random.normal(jax.random.key(n), (size, size)).astype(dtype) for n in range(2))
        products[dtype] = 2.0 * size**3 / seconds_of(square, a, b, at_least=at_least)
    x = jnp.ones((megabytes * 2**18,), jnp.float32)
    copies = 2.0 * x.nbytes / seconds_of(jax.jit(lambda x: x + 1.0), x, at_least=at_least)
    chip = _chip()
    findings.tell(products=products, copies=copies)
    with contextlib.suppress(TypeError, KeyError):
        findings.tell(memory=device.memory_stats()["bytes_limit"])
    share = lambda rate, of: f" ({rate / getattr(chip, of):.0%} of the published)" if chip else ""
    findings.tell(
        said=f"{device.device_kind}; products {products['bfloat16'] / 1e12:,.1f} TFLOP/s in bfloat16"
        f"{share(products['bfloat16'], 'bf16_flops')}, {products['float32'] / 1e12:,.1f} in float32; memory "
        f"{copies / 1e9:,.0f} GB/s{share(copies, 'hbm_bandwidth')}"
    )


def _driver() -> dict[str, str]:
    """What the driver tells of the first GPU; nothing where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(QUERY, (value.strip() for value in told.split(","))))


def attention_alone(findings: Any, *, shapes: list[tuple[int, ...]], at_least: float) -> None:
    """Causal attention in bfloat16, forward, and forward and backward, each measured for so many seconds."""
    rows = []
    for batch, pos, heads, kv_heads, head_dim in shapes:
        sizes = [(batch, pos, count, head_dim) for count in (heads, kv_heads, kv_heads)]
        q, k, v = (jax.random.normal(jax.random.key(n), size, products_dtype()) for n, size in enumerate(sizes))

        def weighted(q, k, v):
            return dot_product_attention(q, k, v).astype(jnp.float32).sum()

        forward = 2.0 * batch * heads * pos * (pos + 1) * head_dim  # two products over pairs that see each other
        moved = 2.0 * (q.nbytes + k.nbytes)
        programs = {"forward": (dot_product_attention, 1.0, 1.0), "both": (jax.grad(weighted, (0, 1, 2)), 3.5, 3.0)}
        for which, (fn, times, reads) in programs.items():  # backward: five products more, scores anew
            seconds = seconds_of(jax.jit(fn), q, k, v, at_least=at_least)
            what = f"{batch} x {pos}, {heads} heads, {kv_heads} kv heads, head_dim {head_dim}, {which}"
            rows.append({"what": what, **bound_of(forward * times, moved * reads, seconds)})
            findings.tell(rows=rows)
    say(findings)


def loss_alone(findings: Any, *, shapes: list[tuple[int, int, int]], at_least: float) -> None:
    """The product with the unembedding and the cross entropy in bfloat16, with both gradients, measured for so many
    seconds."""
    rows = []
    for tokens, embed, vocab in shapes:
        x = jax.random.normal(jax.random.key(0), (1, tokens, embed), products_dtype())
        table = (jax.random.normal(jax.random.key(1), (vocab, embed)) * embed**-0.5).astype(x.dtype)
        targets = jax.random.randint(jax.random.key(2), (1, tokens), 0, vocab)

        def loss(x, table, targets):
            return linear_cross_entropy(x, table, targets, vocab_first=True).total

        measured = jax.jit(jax.value_and_grad(loss, (0, 1)))
        seconds = seconds_of(measured, x, table, targets, at_least=at_least)
        moved = 2.0 * (x.nbytes + table.nbytes)
        what = f"{tokens:,} tokens, embed {embed}, vocabulary {vocab:,}"
        rows.append({"what": what, **bound_of(6.0 * tokens * embed * vocab, moved, seconds)})
        findings.tell(rows=rows)
    say(findings)


def bound_of(flops: float, num_bytes: float, seconds: float) -> dict[str, float | None]:
    """Seconds, and what the published rates allow at best."""
    chip = _chip()
    least = max(flops / chip.bf16_flops, num_bytes / chip.hbm_bandwidth) if chip else None
    return {"seconds": seconds, "flops": flops, "least": least}


def _chip() -> Chip | None:
    """The device's published rates; None where it is not in the table."""
    chip = local_target(jax.devices()[:1]).chip
    return None if chip.name == "cpu" else chip


def say(findings: Any) -> None:
    """One line of it all."""
    said = []
    for row in findings.values["rows"]:
        share = f", {row['least'] / row['seconds']:.0%} of the bound" if row["least"] else ""
        said.append(
            f"{row['what']}: {row['seconds'] * 1e3:.2f} ms, {row['flops'] / row['seconds'] / 1e12:,.2f} TFLOP/s{share}"
        )
    findings.tell(said="; ".join(said))
