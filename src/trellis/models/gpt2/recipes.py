"""GPT-2 on the user's token store."""

from trellis.models import GPT2Config
from trellis.optim.config import AdamW, Cosine
from trellis.run.config import CheckpointRule, Evaluation, LayoutChoice, Run
from trellis.run.data import Data, StoreSource


def gpt2_small() -> Run:
    """GPT-2 of 124M parameters, half a million tokens a step, with the Mistral stability options, on 8 A100 GPUs.

    With less memory, compute a step in parts: `--microbatches 16 --remat.policy saved`.

    trellis plan gpt2_small --on 8xA100
    trellis tokenize CORPUS --out tokens --tokenizer gpt2/tokenizer.json
    trellis train gpt2_small --data.source.path tokens
    """
    return Run(
        name="gpt2_small",
        model=GPT2Config(
            vocab=50_257,
            positions=1024,
            embed=768,
            layers=12,
            heads=12,
            mlp=3072,
            norm_eps=1e-5,
            dropout=0.0,
            scale_by_inverse_layer=True,
            upcast_attention=True,
        ),
        data=Data(source=StoreSource(path="tokens"), sequence_length=1024),
        batch_size=512,
        steps=20_000,
        optimizer=AdamW(learning_rate=6e-4),
        schedule=Cosine(warmup_steps=1000),
        layout=LayoutChoice(preset="fsdp"),
        checkpoints=CheckpointRule(every=1000, keep_every=10_000),
        evaluation=Evaluation(every=1000, batches=64),
    )
