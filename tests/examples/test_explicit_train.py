"""The explicit trainer against the named one: the same gradients and losses; and what a forgotten reduction gives."""

import ast
import importlib.util
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trellis as tr
from trellis.data import Batch, FileSource, find_files, tokenize
from trellis.data.store.seqax import write_flat_tokens
from trellis.mesh.manual.reshard import TransitionError
from trellis.models import Llama, LlamaConfig
from trellis.named import named_jit
from trellis.notation import PendingSumError, TypeMismatch, struct_shapes
from trellis.notation.struct import struct_specs
from trellis.optim import make_optimizer
from trellis.optim.config import AdamW, Cosine
from trellis.run.layouts import LayoutChoice, MeshSizes, make_layout
from trellis.train.state import TrainState
from trellis.train.step import StepOptions, loss_and_gradients, make_step

PATH = pathlib.Path(__file__).parents[2] / "examples" / "explicit_train.py"
ROWS, LENGTH = 8, 32


def load(path: pathlib.Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


explicit = load(PATH, "explicit_train")
SMALL = explicit.Model(vocab=64, embed=32, layers=2, kv_heads=2, queries=2, head_dim=8, mlp=64)
TRAINING = explicit.Training(steps=50, learning_rate=1e-2, warmup=5)
CONFIG = LlamaConfig(
    vocab=64, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=64, rope_theta=1e4, tie_embeddings=False
)


@pytest.fixture(scope="module")
def layout():
    return make_layout(MeshSizes(data=4, model=2), LayoutChoice(preset="fsdp_tensor_sequence"), jax.devices())


def batch(step: int) -> dict:
    """Two documents a row, some targets that do not count, and something to learn: tokens count up."""
    rng = np.random.default_rng(step)
    stream = (rng.integers(0, 64, (ROWS, 1)) + np.arange(LENGTH + 1)) % 64
    cut = rng.integers(8, 24, (ROWS, 1))
    pos = np.arange(LENGTH)[None]
    return {
        "tokens": stream[:, :-1].astype(np.int32),
        "targets": stream[:, 1:].astype(np.int32),
        "loss_mask": (rng.random((ROWS, LENGTH)) < 0.9).astype(np.float32),
        "segment_ids": (1 + (pos >= cut)).astype(np.int32),
        "positions": np.where(pos >= cut, pos - cut, pos).astype(np.int32),
    }


def placed(mesh, arrays: dict) -> dict:
    sharding = jax.NamedSharding(mesh, tr.parse("batch/data pos").spec)
    return {name: jax.device_put(x, sharding) for name, x in arrays.items()}


def flat(model: Llama):
    """The named model's parameters as the explicit trainer stores them (whole, on the host)."""
    block = model.layers.block
    heads = lambda x: x.reshape(*x.shape[:-2], SMALL.kv_heads, SMALL.queries, SMALL.head_dim)
    host = lambda x: np.asarray(jax.device_get(x.array))
    out = host(block.attention.out)
    layer = explicit.Layer(
        attention_norm=host(block.attention_norm.scale),
        q=heads(host(block.attention.q)),
        k=host(block.attention.k),
        v=host(block.attention.v),
        out=out.reshape(out.shape[0], SMALL.kv_heads, SMALL.queries, SMALL.head_dim, SMALL.embed),
        mlp_norm=host(block.mlp_norm.scale),
        gate=host(block.mlp.gate),
        up=host(block.mlp.up),
        down=host(block.mlp.down),
    )
    return explicit.Weights(
        embedding=host(model.embedding), layers=layer, norm=host(model.norm.scale), head=host(model.head)
    )


def put(mesh, weights):
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    return jax.tree.map(place, weights, struct_specs(explicit.Weights, mesh))


@pytest.fixture(scope="module")
def named_model(layout):
    with layout:
        return named_jit(lambda key: Llama.init(CONFIG, key=key))(jax.random.key(0))


@pytest.mark.slow
def test_the_same_gradients_as_the_named_trainer(layout, named_model):
    with layout:
        arrays = placed(layout.mesh, batch(0))
        sums, _, wanted = named_jit(lambda m, b: loss_and_gradients(m, Batch(**b).named(), StepOptions()))(
            named_model, arrays
        )
        weights = put(layout.mesh, flat(named_model))
        run = jax.jit(explicit.loss_and_gradients, static_argnums=(2, 3))
        loss, gradients = run(weights, explicit.Batch(**arrays), SMALL, "float32")
    np.testing.assert_allclose(loss, sums.cross_entropy / sums.tokens, rtol=1e-6)
    assert jax.tree.map(tr.typeof, gradients) == jax.tree.map(tr.typeof, weights)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(flat(wanted)), strict=True):
        assert np.linalg.norm(np.asarray(got) - want) <= 1e-5 * np.linalg.norm(want)
        assert np.linalg.norm(want) > 0


@pytest.mark.slow
def test_fifty_steps_stay_with_the_named_trainer(layout, named_model):
    optimizer = make_optimizer(
        AdamW(learning_rate=1e-2, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1),
        Cosine(warmup_steps=5, final_fraction=0.1),
        steps=50,
        clip_norm=1.0,
    )
    losses = {"named": [], "explicit": []}
    with layout:
        weights = put(layout.mesh, flat(named_model))
        zeros = lambda: jax.tree.map(jnp.zeros_like, weights)
        mine = explicit.State(step=jnp.int32(0), weights=weights, mean=zeros(), square=zeros())
        theirs = TrainState(jnp.int32(0), named_model, optimizer.init(named_model), None, jax.random.key(0))
        named_step = named_jit(make_step(optimizer, StepOptions()))
        explicit_step = jax.jit(explicit.train_step, static_argnums=(2, 3))
        for step in range(50):
            arrays = placed(layout.mesh, batch(step))
            theirs, metrics = named_step(theirs, Batch(**arrays))
            losses["named"].append(float(metrics["loss"]))
            mine, found = explicit_step(mine, explicit.Batch(**arrays), SMALL, TRAINING)
            losses["explicit"].append(float(found["loss"]))
            if step == 0:
                np.testing.assert_allclose(found["grad_norm"], metrics["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(losses["explicit"], losses["named"], atol=1e-4)
    assert losses["explicit"][-1] < losses["explicit"][0] - 2


@pytest.mark.slow
def test_it_reads_flat_tokens_goes_on_where_it_stopped_and_shows_itself(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(PATH.read_text())
    store = tokenize(FileSource(files=find_files(tmp_path / "text.txt")), tmp_path / "store", use_bytes=True, workers=0)
    write_flat_tokens(store, str(tmp_path / "seqax"), split="train")
    command = f"--devices 0 --steps 6 --every 2 --save-every 3 --store {tmp_path}/seqax/train --folder {tmp_path}/run"
    first = explicit.main([*command.split(), "--profile", "--graph"])
    assert len(first) == 6 and first[-1] < first[0]
    assert (tmp_path / "run" / "graph.svg").read_text().startswith("<svg")
    assert list((tmp_path / "run" / "profile").rglob("perfetto_trace.json.gz"))
    assert "MFU" in capsys.readouterr().out
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not [p for p in checkpoints.rglob("*") if p.suffix in (".pkl", ".pickle")]
    shutil.rmtree(checkpoints / "step-00000006")
    again = explicit.main(command.split())
    assert "goes on after step 3" in capsys.readouterr().out
    assert again == first[3:]


def test_it_is_short_and_every_collective_is_a_verb():
    text = PATH.read_text()
    assert len(text.splitlines()) <= 500
    assert not re.search(r"lax\.(psum|pmax|all_gather|all_to_all|ppermute|pmean|reduce_scatter)", text)


def span(node) -> tuple[int, int, int, int]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


CALLS = [
    (span(node), node.func.attr)
    for node in ast.walk(ast.parse(PATH.read_text()))
    if isinstance(node, ast.Call)
    and isinstance(node.func, ast.Attribute)
    and node.func.attr in ("all_gather", "all_reduce", "reduce_scatter", "reshard")
]
SUMS = [call for call in CALLS if call[1] in ("all_reduce", "reduce_scatter")]
OTHERS = [call for call in CALLS if call not in SUMS]
show = lambda call: f"{call[1]} of line {call[0][0]}"


class Forget(ast.NodeTransformer):
    """Replaces one call `verb(text, x)` by `x`."""

    def __init__(self, place: tuple):
        self.place = place

    def visit_Call(self, node):
        self.generic_visit(node)
        return node.args[1] if span(node) == self.place else node


def without(place: tuple, folder: pathlib.Path):
    """The trainer with one call left out, from a file of its own."""
    path = folder / "forgotten.py"
    path.write_text(ast.unparse(Forget(place).visit(ast.parse(PATH.read_text()))))
    return load(path, "forgotten")


def trace(module, mesh):
    weights = struct_shapes(module.Weights, SMALL.sizes(), mesh)
    state = module.State(step=jax.ShapeDtypeStruct((), jnp.int32), weights=weights, mean=weights, square=weights)
    sizes = {"batch": ROWS, "pos": LENGTH}
    read = struct_shapes(module.Batch, sizes, mesh)
    jax.eval_shape(lambda s, b: module.train_step(s, b, SMALL, TRAINING), state, read)


@pytest.mark.slow
def test_the_whole_trainer_passes_the_same_check(layout, tmp_path):
    with layout:
        trace(without((), tmp_path), layout.mesh)
    assert len(SUMS) == 9 and len(OTHERS) == 12


@pytest.mark.parametrize("call", SUMS, ids=show)
def test_a_forgotten_sum_is_refused_with_its_line(call, layout, tmp_path):
    module = without(call[0], tmp_path)
    with layout, pytest.raises(PendingSumError, match=r"\(forgotten\.py:\d+: .*\): write reshard\("):
        trace(module, layout.mesh)


# A word of the line that uses what should have been gathered, for each call in order.
USES = ["scale", "einsum", "wq", "wk", "wv", "wo", "gate", "up", "down", "take", "logits", "largest"]


@pytest.mark.parametrize(("call", "use"), list(zip(OTHERS, USES, strict=True)), ids=USES)
def test_a_forgotten_gather_is_refused_with_the_line_that_uses_it(call, use, layout, tmp_path):
    module = without(call[0], tmp_path)
    with layout, pytest.raises((TypeMismatch, TransitionError)) as error:
        trace(module, layout.mesh)
    lines = re.findall(r" \(forgotten\.py:(\d+): ", str(error.value))
    assert len(lines) == 1
    assert use in (tmp_path / "forgotten.py").read_text().splitlines()[int(lines[0]) - 1]
