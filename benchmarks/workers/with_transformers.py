"""transformers' Llama on torch in eager mode, with torch's fused AdamW."""

import time

start = time.perf_counter()
import torch  # noqa: E402
from serve import arguments, serve  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

imported = time.perf_counter() - start

_, dtype = arguments()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=4096, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=1408, max_position_embeddings=512, tie_word_embeddings=False, use_cache=False,
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
tokens = torch.randint(0, 4096, (8, 512))
context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def step() -> float:
    with context:
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


serve(step, tokens=tokens.numel(), import_seconds=imported, packages=("torch", "transformers"))
