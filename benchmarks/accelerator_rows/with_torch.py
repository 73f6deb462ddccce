"""The same Llama in PyTorch: `torch.compile`, flash attention, fused AdamW, weights in float32, bfloat16 products."""

import statistics
import time
from typing import Any

from process import STARTED, Missing

WORKS = ("train_torch",)


def train_torch(findings: Any, *, recipe: str, options: dict, steps: int = 10) -> None:
    """Tokens a second of a recipe's model, batch and length in PyTorch."""
    try:
        import torch
    except ImportError:
        raise Missing("needs torch, which is not installed") from None
    from trellis.recipes import load_run

    run = load_run(recipe, options)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if cuda:
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    config, rows, length = run.model, run.batch_sizes()[0].size, run.data.sequence_length
    model = llama(config).to(device)
    compiled = torch.compile(model) if cuda else model  # on a CPU it would need a compiler of C++
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    stream = torch.randint(0, config.vocab, (rows, length + 1), device=device)
    wait = torch.cuda.synchronize if cuda else lambda: None

    def step() -> float:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compiled(stream[:, :-1], stream[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    loss = float(step())
    findings.tell(first_step_seconds=time.time() - STARTED, first_loss=loss, version=torch.__version__)
    times = []
    for _ in range(steps if cuda else 3):
        wait()
        started = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    speed = rows * length / seconds
    peak = torch.cuda.max_memory_allocated() if cuda else None
    findings.tell(step_seconds=seconds, tokens_per_second=speed, measured_peak=peak, recipe=recipe)
    memory = f", {peak / 2**30:.1f} GiB" if peak else ""
    how = "compiled" if cuda else "eager"
    findings.tell(
        said=f"torch {torch.__version__}, {how}: {speed:,.0f} tokens/s, step {seconds * 1e3:.1f} ms{memory}, first "
        f"step after {findings.values['first_step_seconds']:.0f} s"
    )


def llama(config: Any) -> Any:
    """A Llama of a `LlamaConfig`'s sizes as a `torch.nn.Module`: `(tokens, targets) -> loss`."""
    import torch
    from torch import nn
    from torch.nn import functional

    heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            linear = lambda inner, outer: nn.Linear(inner, outer, bias=False)
            self.norms = nn.ModuleList(nn.RMSNorm(config.embed, eps=config.norm_eps) for _ in range(2))
            self.q, self.out = linear(config.embed, heads * width), linear(heads * width, config.embed)
            self.kv = linear(config.embed, 2 * kv_heads * width)
            self.into, self.down = linear(config.embed, 2 * config.mlp), linear(config.mlp, config.embed)

        def forward(self, x, cos, sin):
            rows, length, _ = x.shape
            y = self.norms[0](x)
            q = self.q(y).view(rows, length, heads, width).transpose(1, 2)
            k, v = self.kv(y).view(rows, length, 2 * kv_heads, width).transpose(1, 2).chunk(2, 1)
            q, k = (turned(z, cos, sin) for z in (q, k))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, heads * width))
            gate, up = self.into(self.norms[1](x)).chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    def turned(x, cos, sin):
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(config.vocab, config.embed)
            self.blocks = nn.ModuleList(Block() for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.embed, eps=config.norm_eps)
            self.head = nn.Linear(config.embed, config.vocab, bias=False)
            for weight in self.parameters():
                if weight.ndim > 1:
                    nn.init.normal_(weight, std=0.02)

        def forward(self, tokens, targets):
            rates = config.rope_theta ** -(torch.arange(0, width, 2, device=tokens.device) / width)
            angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates
            cos, sin = angles.cos(), angles.sin()
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, cos, sin)
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return Llama()
