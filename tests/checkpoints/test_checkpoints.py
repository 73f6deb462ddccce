"""Checkpoints are whole or absent, come back to the bit on any mesh, and damage is found."""

import json
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trellis
from trellis.checkpoints import checkpoints as checkpoints_module
from trellis.checkpoints.checkpoints import MANIFEST, Checkpoints, finished_steps
from trellis.checkpoints.manifest import own_checksum
from trellis.errors import UserError
from trellis.named import NamedArray


def mesh_of(**axes):
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes), devices=jax.devices()[:count]
    )


def put(mesh, spec, value):
    return jax.device_put(value, NamedSharding(mesh, spec))


def state_on(mesh, first="data", second="model", rows=16):
    first, second = (axis if axis in mesh.shape else None for axis in (first, second))
    table = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8) + 1
    bias = np.arange(8, dtype=np.float32).astype(jnp.bfloat16)
    return {
        "params": {
            "table": NamedArray(put(mesh, P(first, second), table), ("vocab", "embed")),
            "bias": NamedArray(put(mesh, P(second), bias), ("embed",)),
        },
        "moments": (put(mesh, P(first), np.linspace(0, 1, 16, dtype=np.float32)), None),
        "step": put(mesh, P(), np.int32(7)),
        "key": put(mesh, P(), jax.random.key(3)),
    }


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def values(tree):
    raw = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    return [np.asarray(x) for x in jax.tree.leaves(raw)]


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(values(a), values(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def wide():
    return mesh_of(data=4, model=2)


@pytest.mark.slow
def test_a_state_comes_back_to_the_bit(tmp_path, wide):
    state = state_on(wide)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(abstract(state)) is None
        assert checkpoints.save(5, state, data={"tokens": 640})
        checkpoints.wait()
        assert checkpoints.latest() == 5
        assert not checkpoints.save(5, state), "a finished checkpoint is not written twice"
        found = checkpoints.restore(abstract(state))
    assert (found.step, found.data) == (5, {"tokens": 640})
    same(found.state, state)
    key = found.state["key"]
    assert jax.random.key_impl(key) == jax.random.key_impl(state["key"])
    for got, want in zip(jax.tree.leaves(found.state), jax.tree.leaves(state), strict=True):
        assert got.sharding == want.sharding


@pytest.mark.parametrize("axes", [{"data": 1}, {"model": 8}, {"data": 2, "model": 4}])
def test_a_state_comes_back_onto_another_mesh(tmp_path, wide, axes):
    other = state_on(mesh_of(**axes), first="model", second="data")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_on(wide))
        checkpoints.wait()
        found = checkpoints.restore(abstract(other))
    same(found.state, other)
    for got, want in zip(jax.tree.leaves(found.state), jax.tree.leaves(other), strict=True):
        assert got.sharding == want.sharding


def test_one_layer_can_be_read_alone(tmp_path, wide):
    import tensorstore

    stack = np.arange(3 * 16 * 8, dtype=np.float32).reshape(3, 16, 8)
    with Checkpoints(tmp_path, host_bytes=stack.nbytes) as checkpoints:
        checkpoints.save(2, {"up": NamedArray(put(wide, P(None, "data", "model"), stack), ("layers", "embed", "mlp"))})
        checkpoints.wait()
        np.testing.assert_array_equal(checkpoints.read(2, "up"), stack)
        np.testing.assert_array_equal(checkpoints.read(2, "up", 1), stack[1])
    where = {"driver": "ocdbt", "base": f"file://{checkpoints.path(2)}/state/", "path": "up/"}
    stored = tensorstore.open({"driver": "zarr", "kvstore": where}).result()
    assert stored.chunk_layout.read_chunk.shape == (1, 4, 4), "a device's part of a layer"


def test_a_folder_may_have_any_name_but_one_in_which_a_slash_is_seen(tmp_path, wide):
    state = state_on(wide)
    with Checkpoints(tmp_path / "50% of #3?" / "a%41b") as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        same(checkpoints.restore(abstract(state)).state, state)
        np.testing.assert_array_equal(checkpoints.read(1, "params.table"), values(state["params"]["table"])[0])
    with pytest.raises(UserError, match="The path of a run's folder must contain no backslash") as error:
        Checkpoints(tmp_path / "a\\b" / "checkpoints")
    assert error.value.fix == "rename it, or use another --run-dir"


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path, wide):
    state = {"w": put(wide, P("data", "model"), np.ones((512, 512), np.float32))}
    burn = jax.jit(lambda s: jax.tree.map(lambda x: x * 3 + 1, s), donate_argnums=0)
    target = abstract(state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        for _ in range(4):
            state = burn(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        found = checkpoints.restore(target, step=0)
    np.testing.assert_array_equal(np.asarray(found.state["w"]), np.ones((512, 512), np.float32))


def test_what_is_being_saved_is_what_is_restored(tmp_path, wide, monkeypatch):
    """Not the one before it: the checkpoint under way is waited for."""
    finish = Checkpoints._finish
    monkeypatch.setattr(Checkpoints, "_finish", lambda *args: (time.sleep(0.2), finish(*args)))
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_on(wide))
        assert checkpoints.restore(abstract(state_on(wide))).step == 2


@pytest.mark.slow
def test_the_rule_keeps_the_latest_and_every_kth(tmp_path, wide):
    state = {"w": put(wide, P("data"), np.arange(8, dtype=np.float32))}
    with Checkpoints(tmp_path, keep_latest=2, keep_every=4) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, state)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6, 7]


def test_what_was_left_unfinished_is_removed(tmp_path, wide):
    state = {"w": put(wide, P("data"), np.arange(8, dtype=np.float32))}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    lines = []
    with Checkpoints(tmp_path, report=lines.append) as checkpoints:
        assert lines == ["checkpoint step-00000002 was cut off before it was finished, and is removed"]
        assert checkpoints.steps() == [1]
        assert not (tmp_path / "step-00000002").exists()
        assert checkpoints.restore(abstract(state)).step == 1


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def largest(folder):
    return max((p for p in (folder / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda f: flip(largest(f)), "has changed since it was written (checksum)"),
        (lambda f: largest(f).write_bytes(largest(f).read_bytes()[:-1]), "were written"),
        (lambda f: largest(f).unlink(), "is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "JSONDecodeError"),
        (lambda f: (f / "manifest.json").write_text("{}"), "manifest.json has changed since it was written (checksum)"),
        (lambda f: (f / "manifest.json").write_text("0"), "manifest.json has changed since it was written (checksum)"),
        (
            lambda f: (f / "manifest.json").write_text(
                (f / "manifest.json").read_text().replace('"step": 2', '"step": 9')
            ),
            "manifest.json has changed since it was written (checksum)",
        ),
        (lambda f: shutil.copytree(f.with_name("step-00000001"), f, dirs_exist_ok=True), "is that of step-00000001"),
    ],
    ids=[
        "a bit",
        "cut short",
        "gone",
        "manifest cut",
        "manifest empty",
        "manifest a number",
        "manifest changed",
        "of another step",
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(tmp_path, wide, harm, words):
    state, lines = state_on(wide), []
    with Checkpoints(tmp_path, report=lines.append) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
        checkpoints.wait()
        harm(checkpoints.path(2))
        found = checkpoints.restore(abstract(state))
        assert found.step == 1
        same(found.state, state)
        assert checkpoints.save(2, state), "the step can be saved anew"
    assert len(lines) == 1 and words in lines[0]
    assert lines[0].startswith("checkpoint step-00000002 is damaged and is set aside as damaged-step-00000002: ")
    assert (tmp_path / "damaged-step-00000002").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["before it is verified", "before it is read"])
def test_a_checkpoint_that_its_run_removes_is_not_damaged(tmp_path, wide, monkeypatch, gone):
    state, lines = state_on(wide), []
    with Checkpoints(tmp_path, keep_latest=1) as training:
        training.save(1, state)
        training.wait()
        reading = Checkpoints(tmp_path, read_only=True, report=lines.append)
        name = "_verify_together" if gone == "before it is verified" else "check_names"
        whole, removals = getattr(checkpoints_module, name), [2]

        def as_the_run_goes_on(*given):
            if removals:
                training.save(removals.pop(), state)
                training.wait()
            return whole(*given)

        monkeypatch.setattr(checkpoints_module, name, as_the_run_goes_on)
        assert reading.restore(abstract(state)).step == 2, "the newest is looked for again"
        removals.append(3)
        with pytest.raises(UserError, match="A run must keep a checkpoint for as long as it is read") as error:
            reading.restore(abstract(state), step=2)
        assert error.value.seen == "step-00000002, which the run has removed since, as it trains on"
        removals.extend((6, 5, 4))
        with pytest.raises(UserError, match="A run must keep a checkpoint for as long as it is read"):
            reading.restore(abstract(state))
        with pytest.raises(UserError, match="A run must keep a checkpoint for as long as it is read"):
            reading.read(2, "params.table")
        reading.close()
    assert not lines, "nothing is damaged"


def test_all_damaged_is_an_error(tmp_path, wide):
    state = state_on(wide)
    with Checkpoints(tmp_path, report=lambda _: None) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        flip(largest(checkpoints.path(1)))
        with pytest.raises(UserError, match="A run can resume only from a complete, undamaged checkpoint") as error:
            checkpoints.restore(abstract(state))
        assert error.value.fix == "restore a copy of the folder, or start a new run in another folder"
        with pytest.raises(UserError, match="damaged-step-00000001 and no other"):  # nor does it begin anew next time
            checkpoints.restore(abstract(state))


def test_a_checkpoint_of_another_version_is_refused_and_left_alone(tmp_path, wide):
    state = state_on(wide)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        path = checkpoints.path(1) / "manifest.json"
        later = {**json.loads(path.read_text()), "format": 2}
        later.pop("crc")
        path.write_text(json.dumps({**later, "crc": own_checksum(later)}))
        with pytest.raises(UserError, match="a format that this version of Trellis can read") as error:
            checkpoints.restore(abstract(state))
        assert error.value.seen == "format 2, and this version reads 1"
        assert error.value.where == str(checkpoints.path(1)) and checkpoints.steps() == [1]


def test_a_copy_of_the_run_lies_in_each_checkpoint(tmp_path, wide):
    run = tmp_path / "run.yaml"
    run.write_text("steps: 3\n")
    with Checkpoints(tmp_path / "checkpoints", copy=(run,)) as checkpoints:
        checkpoints.save(3, state_on(wide))
    folder = tmp_path / "checkpoints" / "step-00000003"
    assert (folder / "run.yaml").read_text() == "steps: 3\n"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "run.yaml" in manifest["files"]
    assert manifest["entries"]["params/table"] == {"shape": [16, 8], "dtype": "float32", "names": ["vocab", "embed"]}
    assert manifest["entries"]["key"] == {"shape": [2], "dtype": "uint32", "key": "threefry2x32"}


@pytest.mark.parametrize("saved_rows, rows", [(16, 24), (24, 16), (16, 14)])
def test_only_the_padding_of_an_axis_may_change(tmp_path, wide, saved_rows, rows):
    saved = {"table": state_on(wide, rows=saved_rows)["params"]["table"]}
    other = mesh_of(model=2)
    target = abstract({"table": state_on(other, first="model", second=None, rows=rows)["params"]["table"]})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        checkpoints.wait()
        with pytest.raises(UserError, match="only the padding of a vocabulary can change"):
            checkpoints.restore(target)
        with pytest.raises(UserError, match=r"saved float32\[\d+x8\] \(vocab embed\), wanted float32\[\d+x8\]"):
            checkpoints.restore(target, resizable={"vocab": 15 if rows == 14 else 17})
        true_size = 13
        table = checkpoints.restore(target, resizable={"vocab": true_size}).state["table"]
    assert table.array.shape == (rows, 8) and table.names == ("vocab", "embed")
    np.testing.assert_array_equal(np.asarray(table.array)[:true_size], np.asarray(saved["table"].array)[:true_size])
    assert not np.asarray(table.array)[true_size:].any()


def test_what_does_not_fit_is_refused(tmp_path, wide):
    state = state_on(wide)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        target = abstract(state)
        with pytest.raises(UserError, match="not in the checkpoint: extra; not in the state: step"):
            checkpoints.restore({**{k: v for k, v in target.items() if k != "step"}, "extra": target["step"]})
        half = dict(target, step=jax.ShapeDtypeStruct((), jnp.float32, sharding=target["step"].sharding))
        with pytest.raises(UserError, match=r"saved int32\[scalar\], wanted float32\[scalar\]") as error:
            checkpoints.restore(half)
        assert error.value.where.startswith("step in ")
        renamed = dict(target, params=dict(target["params"], bias=NamedArray(target["params"]["bias"].array, ("mlp",))))
        with pytest.raises(UserError, match=r"\(embed\), wanted bfloat16\[8\] \(mlp\)"):
            checkpoints.restore(renamed)
        with pytest.raises(UserError, match="Only a finished checkpoint can be restored") as error:
            checkpoints.restore(target, step=3)
        assert error.value.fix == "use one of the steps [1]"
        part = checkpoints.restore({"params": target["params"]}, partial=True)
    same(part.state, {"params": state["params"]})


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, wide):
    state, empty = state_on(wide), put(wide, P(), np.zeros((3, 0), np.float32))
    with Checkpoints(tmp_path) as checkpoints:
        for step in (-1, 2.5, jnp.int32(-3)):
            with pytest.raises(UserError, match="The step of a checkpoint must be a whole number, 0 or more"):
                checkpoints.save(step, state)
        for bad, seen in (({}, "a state without leaves"), ({"w": empty}, r"\(3, 0\)")):
            with pytest.raises(UserError, match=f"only arrays of at least one element(.|\n)*{seen}"):
                checkpoints.save(1, bad)
        with pytest.raises(UserError, match=r"must be valid JSON(.|\n)*ndarray is not JSON serializable"):
            checkpoints.save(1, state, data={"position": np.arange(3)})
        assert list(tmp_path.iterdir()) == []
        assert checkpoints.save(state["step"], state)
        checkpoints.wait()
        assert checkpoints.steps() == [int(state["step"])]


def test_what_holds_no_values_is_refused(tmp_path):
    gone = jnp.ones(3)
    gone.delete()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(UserError, match=r"hold their values(.|\n)*an array which was donated") as error:
            checkpoints.save(1, {"w": gone})
        assert error.value.where == "w" and error.value.fix == "save the state that the step returned"
        with pytest.raises(UserError, match=r"an array which is being traced(.|\n)*save outside of jax.jit"):
            jax.jit(lambda w: checkpoints.save(1, {"w": w}))(jnp.ones(3))
        assert list(tmp_path.iterdir()) == []


def test_a_type_that_does_not_come_back_is_refused(tmp_path):
    types = {"int64": np.int64(2**40), "float64": np.array([1e9]), "uint4": jnp.ones(4, "uint4"), "<U1": np.array("a")}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": np.int32(3)})
        for said, leaf in types.items():
            for call in (lambda state: checkpoints.save(2, state), checkpoints.restore):
                with pytest.raises(UserError, match=f"stored in, and that JAX holds(.|\n)*seen:  {said}") as error:
                    call({"w": leaf})
                assert error.value.where == "w"
        assert checkpoints.steps() == [1] and int(checkpoints.restore({"w": np.int32(0)}).state["w"]) == 3


def test_a_folder_that_is_only_read_takes_no_checkpoint(tmp_path):
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        with pytest.raises(UserError, match="A folder that is only read takes no checkpoint"):
            checkpoints.save(1, {"w": jnp.ones(8)})
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_saved_in_the_order_of_their_steps(tmp_path):
    state = {"w": jnp.ones(8)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        with pytest.raises(UserError, match="in the order of their steps(.|\n)*step 2 after step 3") as error:
            checkpoints.save(2, state)
        assert error.value.fix.startswith("use another folder")
        assert checkpoints.steps() == [3] and not checkpoints.save(3, state)


def test_what_is_being_written_is_not_taken_for_cut_off(tmp_path, monkeypatch):
    state = {"w": jnp.ones(8)}
    finish, go = Checkpoints._finish, threading.Event()
    monkeypatch.setattr(Checkpoints, "_finish", lambda *args: (go.wait(9), finish(*args)))
    lines: list[str] = []
    with Checkpoints(tmp_path) as one:
        one.save(1, state)
        with Checkpoints(tmp_path, report=lines.append) as other:
            with pytest.raises(UserError, match="Only one `Checkpoints` at a time can write") as error:
                other.save(2, state)
            assert error.value.fix.endswith("open it with read_only=True")
            go.set()
            one.wait()
            assert other.steps() == [1] and other.save(2, state)
    assert lines == [] and other.steps() == [1, 2]


def test_what_is_not_in_a_checkpoint_cannot_be_read(tmp_path):
    state = {"a.b": jnp.arange(6.0).reshape(2, 3), "s": jnp.float32(7)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        np.testing.assert_array_equal(checkpoints.read(1, "a.b", 1), [3, 4, 5])  # it waits, as a restore does
        for step, name, layer, seen, fix in (
            (2, "s", None, "no finished checkpoint of this step", "use one of `steps()`"),
            (1, "w", None, "no `w`", "use one of: a.b, s"),
            (1, "a.b", -1, "layer -1 of `a.b` of shape (2, 3)", "use 0 to 1"),
            (1, "s", 0, "layer 0 of `s` of shape ()", "leave it out"),
        ):
            with pytest.raises(UserError, match="What is read of a checkpoint must be in it") as error:
                checkpoints.read(step, name, layer)
            assert (error.value.seen, error.value.fix) == (seen, fix)


def test_a_target_has_leaves_in_slices_of_one_size(tmp_path, wide):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(6)})
        target = jax.ShapeDtypeStruct((6,), jnp.float32, sharding=jax.NamedSharding(wide, P("data")))
        with pytest.raises(UserError, match="Slices of a target must be of one size") as error:
            checkpoints.restore({"w": target})
        assert error.value.where == "w" and "'data': 4" in error.value.seen
        with pytest.raises(UserError, match="The target of a restore must have leaves"):
            checkpoints.restore({}, partial=True)


@pytest.mark.parametrize("axis_type", ["explicit", "auto"])
def test_a_target_on_a_mesh_says_where_its_arrays_lie(tmp_path, axis_type):
    def initial():
        return {"key": jax.random.key(0), "w": trellis.ones({"embed": 16})}

    layout = trellis.Layout(trellis.make_mesh(data=8, axis_type=axis_type), params={"embed": "data"})
    with layout, Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, initial())
        checkpoints.wait()
        with pytest.raises(UserError, match="On a mesh, the arrays of a target must have shardings") as error:
            checkpoints.restore(jax.eval_shape(initial))
        assert error.value.where in ("key", "w") and error.value.fix.startswith("pass trellis.abstract(target)")
        restored = checkpoints.restore(trellis.abstract(jax.eval_shape(initial))).state
        np.testing.assert_array_equal(restored["w"], np.ones(16))
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        np.testing.assert_array_equal(checkpoints.restore(jax.eval_shape(initial)).state["w"], np.ones(16))


def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path, wide):
    checkpoints = Checkpoints(tmp_path, copy=(tmp_path / "absent.yaml",))
    checkpoints.save(1, {"w": put(wide, P(), np.float32(1))})
    with pytest.raises(FileNotFoundError, match="absent.yaml"):
        checkpoints.wait()
    checkpoints.close()
    assert checkpoints.steps() == []


def test_a_folder_that_is_gone_is_told_by_the_system_and_leaves_no_thread(tmp_path, wide):
    state, folder = state_on(wide), tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        folder.rmdir()
        folder.write_text("")
        before = threading.active_count()
        with pytest.raises(NotADirectoryError):
            checkpoints.save(1, state)
        assert threading.active_count() == before


def test_the_finished_steps_of_a_folder(tmp_path):
    """Without opening it, which would clear away what another process is writing."""
    assert finished_steps(tmp_path / "absent") == []
    for step in (20, 3, 21):
        (tmp_path / f"step-{step:08d}").mkdir()
    for step in (20, 3):
        (tmp_path / f"step-{step:08d}" / MANIFEST).write_text("{}")
    assert finished_steps(tmp_path) == [3, 20]
