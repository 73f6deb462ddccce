"""The train step of Trellis, assembled as `trellis train` assembles it, on one device a core."""

import os
import time

import trellis_start

trellis_start.use_huge_pages()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
start = time.perf_counter()
import jax  # noqa: E402
import numpy as np  # noqa: E402
from serve import arguments, serve  # noqa: E402

from trellis.data import Batch  # noqa: E402
from trellis.models import GPT2Config, LlamaConfig  # noqa: E402
from trellis.nn import Precision  # noqa: E402
from trellis.optim import AdamW, Constant  # noqa: E402
from trellis.train import (  # noqa: E402
    CompiledStep,
    Data,
    EmbeddedSource,
    Run,
    assemble,
    find_devices,
    use_persistent_cache,
)

imported = time.perf_counter() - start

MODELS = {
    "nano": GPT2Config(
        vocab=1024, positions=256, embed=256, layers=4, heads=4, mlp=1024, norm_eps=1e-5, dropout=0.0,
        scale_by_inverse_layer=False, upcast_attention=True,
    ),
    "small-llama": LlamaConfig(
        vocab=4096, embed=512, layers=6, heads=8, kv_heads=4, head_dim=64, mlp=1408, rope_theta=10_000.0,
        tie_embeddings=False,
    ),
}  # fmt: skip
BATCHES = {"nano": (16, 256), "small-llama": (8, 512)}

name, dtype = arguments()
model, (batch, pos) = MODELS[name], BATCHES[name]
run = Run(
    name=name,
    model=model,
    data=Data(source=EmbeddedSource(vocab=model.vocab), sequence_length=pos, mask_documents=False),
    batch_size=batch,
    steps=1000,
    optimizer=AdamW(learning_rate=3e-4),
    schedule=Constant(warmup_steps=0),
    precision=Precision(compute=dtype),
)
use_persistent_cache()
assembled = assemble(run, find_devices(run))
tokens = np.random.default_rng(0).integers(0, model.vocab, (batch, pos)).astype(np.int32)
columns = {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), "loss_mask": np.ones(tokens.shape, np.float32)}
data = Batch(**jax.device_put(columns, assembled.batch_sharding))
program = CompiledStep(assembled.step, assembled.compiler_options)
with assembled.layout:
    state = assembled.init()


def step() -> float:
    global state
    with assembled.layout:
        state, metrics = jax.block_until_ready(program(state, data))
    return float(metrics["loss"])


serve(step, tokens=tokens.size, import_seconds=imported, packages=("jax", "optax"))
