"""Released models of families that have no recipe: their configurations have as many parameters as they."""

import jax
import pytest

from trellis.models import Gemma3Config, LinearScaling, MistralConfig, ModelConfig, Olmo2Config, Qwen2Config
from trellis.nn import parameters

RELEASED: dict[str, tuple[ModelConfig, int]] = {
    "Mistral 7B": (
        MistralConfig(
            vocab=32_000, embed=4096, layers=32, heads=32, kv_heads=8, head_dim=128, window=4096, mlp=14_336,
            rope_theta=1e4, tie_embeddings=False,
        ),
        7_241_732_096,
    ),
    "Qwen 2.5 0.5B": (
        Qwen2Config(
            vocab=151_936, embed=896, layers=24, heads=14, kv_heads=2, head_dim=64, mlp=4864, rope_theta=1e6,
            tie_embeddings=True,
        ),
        494_032_768,
    ),
    "OLMo 2 7B": (
        Olmo2Config(
            vocab=100_352, embed=4096, layers=32, heads=32, kv_heads=32, head_dim=128, mlp=11_008, rope_theta=5e5,
            tie_embeddings=False,
        ),
        7_298_617_344,
    ),
    "Gemma 3 1B": (
        Gemma3Config(
            vocab=262_144, embed=1152, layers=26, heads=4, kv_heads=1, head_dim=256, window=512, query_scale=256,
            mlp=6912, rope_theta=1e6,
        ),
        999_885_952,
    ),
    "Gemma 3 27B": (  # 27.4 billion with what reads pictures
        Gemma3Config(
            vocab=262_208, embed=5376, layers=62, heads=32, kv_heads=16, head_dim=128, window=1024, query_scale=168,
            mlp=21_504, rope_theta=1e6, rope_scaling=LinearScaling(factor=8.0),
        ),
        27_009_346_304,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_parameters(name):
    config, count = RELEASED[name]
    assert sum(p.size for p in parameters(jax.eval_shape(lambda: config.init(key=jax.random.key(0))))) == count


def test_a_gemmas_layers():
    """Every sixth sees everything, wherever its group begins; what fills no group comes first."""
    config, _ = RELEASED["Gemma 3 1B"]
    model = jax.eval_shape(lambda: config.init(key=jax.random.key(0)))
    groups = [block.attention.window for block in model.layers.block.blocks]
    assert model.first_layers.axis.size == 2 and model.first_layers.block.attention.window == 512
    assert groups == [512, 512, 512, None, 512, 512] and model.layers.axis.size == 4
    assert [512] * 2 + groups * 4 == list(config.windows) == ([512] * 5 + [None]) * 4 + [512] * 2
