"""nanoGPT's model and optimizer, from the clone that NANOGPT names, in PyTorch's eager mode."""

import os
import sys
import time
from pathlib import Path

start = time.perf_counter()
import torch  # noqa: E402

sys.path.insert(0, os.environ["NANOGPT"])
from model import GPT, GPTConfig  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from serve import arguments, serve  # noqa: E402

imported = time.perf_counter() - start

_, dtype = arguments()
torch.manual_seed(0)
model = GPT(GPTConfig(block_size=256, vocab_size=1024, n_layer=4, n_head=4, n_embd=256, dropout=0.0, bias=True))
optimizer = model.configure_optimizers(0.1, 3e-4, (0.9, 0.95), "cpu")
tokens = torch.randint(0, 1024, (16, 256))
targets = tokens.roll(-1, 1)
context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def step() -> float:
    with context:
        _, loss = model(tokens, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


serve(step, tokens=tokens.numel(), import_seconds=imported, packages=("torch",))
