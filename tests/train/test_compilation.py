"""What is kept of compiled programs."""

import dataclasses

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from trellis.recipes import tiny
from trellis.run.layouts import MeshSizes
from trellis.train.compilation import compile_anew


@pytest.mark.parametrize(("stages", "kept"), [(1, True), (2, False)])
def test_a_pipeline_on_a_cpu_is_compiled_anew(stages, kept):
    """Loaded from the cache, a pipeline of three layers on two stages had other losses, or ended its process."""
    try:
        compile_anew(dataclasses.replace(tiny(), mesh=MeshSizes(stage=stages)), jax.devices())
        assert jax.config.jax_enable_compilation_cache == kept
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
