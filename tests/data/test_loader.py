"""The loader: this host's rows alone, one batch at a time, the same whatever the devices and the depth."""

import threading
import time
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import trellis as tr
from tests.data.corpora import make_store, random_texts
from trellis.data import Batch, Batches, Loader
from trellis.errors import UserError

FIELDS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    store = make_store(tmp_path_factory.mktemp("loader"), random_texts(np.random.default_rng(0), 60))
    return Batches(store, sequence_length=16, batch_size=8, seed=1)


def sharding(shape, spec):
    names = ("data", "model")[: len(shape)]
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])
    return NamedSharding(mesh, PartitionSpec(*spec))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((1,), ()), ((8,), ("data",)), ((4, 2), ("data", None)), ((2, 4), ("data", "model")), ((8,), (None, "data"))],
)
@pytest.mark.parametrize("prefetch", [1, 4])
def test_the_same_batches_on_any_devices(batches, shape, spec, prefetch):
    with Loader(batches, sharding(shape, spec), start_step=3, prefetch=prefetch) as loader:
        for expected in range(3, 8):
            step, batch = next(loader)
            assert step == expected
            for name in FIELDS:
                array = getattr(batch, name)
                assert array.sharding.is_equivalent_to(sharding(shape, spec), 2)
                assert np.array_equal(np.asarray(array), getattr(batches.batch(step), name))


@pytest.mark.parametrize("spec", [("data", "context"), ("data",), None])
def test_loaded_positions_are_dealt_out_as_the_layout_says(batches, spec):
    """The loader reads positions in natural order; in NumPy's arrays from inside the layout they are so again."""
    mesh = tr.make_mesh(data=4, context=2)
    layout = tr.Layout(mesh, compute={"batch": "data", "pos": "context"}, context={"context": "ring"}, dealt="context")
    batch = batches.batch(2)
    if spec is not None:
        with Loader(batches, NamedSharding(mesh, PartitionSpec(*spec)), start_step=2) as loader:
            _, batch = next(loader)
    with layout:
        found, expected = tr.shard(batch.named().targets, "compute"), batches.batch(2).targets
        assert np.array_equal(np.asarray(found), expected)
        assert np.array_equal(np.asarray(found.array), expected.reshape(8, 4, 4)[:, [0, 3, 1, 2]].reshape(8, 16))


def test_a_host_reads_its_rows_alone(batches):
    """Two hosts of four devices, simulated: a sharding that says which devices are here."""
    asked = []

    class Watched(Batches):
        def __init__(self, inner):
            self.__dict__ = dict(inner.__dict__)

        def batch(self, step, rows=None):
            asked.append((rows.start, rows.stop))
            return super().batch(step, rows)

    class HalfHere:
        def __init__(self, inner, first):
            self.inner, self.first = inner, first

        def addressable_devices_indices_map(self, shape):
            items = list(self.inner.devices_indices_map(shape).items())
            return dict(items[self.first : self.first + 4])

    full = sharding((8,), ("data",))
    for first in (0, 4):
        here = HalfHere(full, first)
        shape = (8, 16)
        from trellis.data.loader import rows_here

        asked.clear()
        read = rows_here(Watched(batches), 5, here, shape)
        assert sorted(asked) == [(row, row + 1) for row in range(first, first + 4)]
        for (start, stop), part in read.items():
            assert np.array_equal(part.targets, batches.batch(5).targets[start:stop])


def test_a_batch_is_a_pytree(batches):
    batch = batches.batch(0)
    assert len(jax.tree.leaves(batch)) == 5 and batch.shape == (8, 16)
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: x + x, b))(batch)
    assert isinstance(doubled, Batch) and np.array_equal(doubled.targets, batch.targets * 2)


def test_it_reads_ahead_one_at_a_time(batches):
    """Never more than `prefetch` batches ahead, and each as soon as there is room for it."""
    steps: list[int] = []

    class Counted(Batches):
        def __init__(self, inner):
            self.__dict__ = dict(inner.__dict__)

        def batch(self, step, rows=None):
            steps.append(step)
            return super().batch(step, rows)

    with Loader(Counted(batches), sharding((1,), ()), prefetch=3) as loader:
        for taken in range(4):
            deadline = time.monotonic() + 20
            while len(steps) < taken + 3 and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(0.02)
            assert steps == list(range(taken + 3))
            assert next(loader)[0] == taken


def test_waiting_is_measured(batches, monkeypatch):
    """By a clock of its own, since this thread or the other may be held up for as long as any limit."""
    clock = types.SimpleNamespace(perf_counter=iter((1.0, 3.5, 4.0, 5.0)).__next__)
    monkeypatch.setattr("trellis.data.loader.time", clock)
    with Loader(batches, sharding((1,), ())) as loader:
        next(loader)
        assert loader.wait_seconds == 2.5
        next(loader)
        assert loader.wait_seconds == 1.0


def test_errors_arrive_where_the_batch_is_asked_for(batches):
    class Broken(Batches):
        def __init__(self, inner):
            self.__dict__ = dict(inner.__dict__)

        def batch(self, step, rows=None):
            if step == 2:
                raise UserError("rule", seen="x", where="y", fix="z")
            return super().batch(step, rows)

    loader = Loader(Broken(batches), sharding((1,), ()))
    assert next(loader)[0] == 0 and next(loader)[0] == 1
    with pytest.raises(UserError, match="rule"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)


def test_it_ends_with_the_data(batches):
    finite = Batches(batches.data, sequence_length=16, batch_size=8, max_epochs=1)
    with Loader(finite, sharding((8,), ("data",))) as loader:
        assert [step for step, _ in loader] == list(range(finite.num_steps))


def test_closing_leaves_no_thread(batches):
    before = set(threading.enumerate())
    loader = Loader(batches, sharding((1,), ()), prefetch=2)
    next(loader)
    loader.close()
    loader.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(StopIteration):
        next(loader)


def test_a_schedule_of_batch_sizes(batches):
    growing = Batches(batches.data, sequence_length=16, batch_size=[(0, 8), (2, 16)])
    with Loader(growing, sharding((8,), ("data",))) as loader:
        assert [next(loader)[1].shape for _ in range(4)] == [(8, 16), (8, 16), (16, 16), (16, 16)]


def test_a_batch_that_the_devices_cannot_share(batches):
    odd = Batches(batches.data, sequence_length=16, batch_size=6)
    with Loader(odd, sharding((4,), ("data",))) as loader:
        with pytest.raises(UserError) as raised:
            next(loader)
    assert raised.value.rule == "A batch must split evenly over the devices."
    assert raised.value.seen == "6 rows of 16 tokens, sharded ('data',) over data=4"
    assert raised.value.fix == "choose a batch_size and a sequence_length that the mesh axes divide"
