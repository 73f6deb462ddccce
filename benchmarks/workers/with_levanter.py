"""Levanter's Llama, AdamW and train step through its own Trainer, run by the Python of an environment that has it."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp

os.environ.setdefault("JAX_PLATFORMS", "cpu")
start = time.perf_counter()
import haliax as hax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jmp  # noqa: E402
from levanter.checkpoint import CheckpointerConfig  # noqa: E402
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel  # noqa: E402
from levanter.models.lm_model import LmExample  # noqa: E402
from levanter.optim.config import AdamConfig  # noqa: E402
from levanter.tracker import NoopConfig  # noqa: E402
from levanter.trainer import Trainer, TrainerConfig  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from serve import arguments, serve  # noqa: E402

imported = time.perf_counter() - start

_, dtype = arguments()
config = LlamaConfig(
    max_seq_len=512, hidden_dim=512, intermediate_dim=1408, num_layers=6, num_heads=8, num_kv_heads=4,
    tie_word_embeddings=False, gradient_checkpointing=False,
)  # fmt: skip
folder = mkdtemp()
trainer_config = TrainerConfig(
    id="speed", tracker=NoopConfig(), mp=jmp.get_policy(f"p=f32,c={dtype}"), train_batch_size=8, num_train_steps=1000,
    require_accelerator=False, log_dir=Path(folder), log_jaxprs=False, log_xla_hlo=False, load_checkpoint=False,
    checkpointer=CheckpointerConfig(base_path=folder, save_interval=timedelta(days=1)),
)  # fmt: skip
optimizer = AdamConfig(learning_rate=3e-4, weight_decay=0.1, beta2=0.95, lr_schedule="constant", warmup=0)
Vocab, Batch, Pos = hax.Axis("vocab", 4096), hax.Axis("batch", 8), hax.Axis("position", 512)
loss = lambda model, example, *, key=None: model.compute_next_token_loss(example, key=key)

trainer = Trainer(trainer_config, optimizer.build(1000), loss, add_default_hooks=False)
trainer.__enter__()
state = trainer.initial_state(
    jax.random.key(0), model_init=lambda: LlamaLMHeadModel.init(Vocab, config, key=jax.random.key(1))
)
tokens = hax.random.randint(jax.random.key(2), (Batch, Pos), 0, Vocab.size).astype(jnp.int32)
example = hax.vmap(LmExample.causal, Batch)(tokens)


def step() -> float:
    global state
    info = trainer.train_step(state, example)
    state = jax.block_until_ready(info.state)
    return float(info.loss)


serve(step, tokens=8 * 512, import_seconds=imported, packages=("jax", "marin-levanter"))
