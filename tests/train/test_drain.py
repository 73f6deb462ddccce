"""Metrics are fetched behind the loop: these tests hold the device still and see the loop go on."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trellis.train.drain import Drain, Record


class Gate:
    """A device computation that ends when the test opens it. On one CPU device JAX would run it while dispatching."""

    def __init__(self):
        self.event = threading.Event()
        self.everywhere = NamedSharding(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]), P())

    def metrics(self, loss):
        def wait(x):
            if not self.event.wait(30):
                raise TimeoutError("the gate was never opened")
            return np.asarray(x)

        through = jax.jit(lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x))
        return {"loss": through(jax.device_put(jnp.float32(loss), self.everywhere))}


@pytest.fixture
def drain():
    drain = Drain(max_ahead=2)
    yield drain
    drain.close()


def test_pushing_and_polling_do_not_wait_for_the_device(drain):
    gate = Gate()
    drain.push(1, gate.metrics(0.5))
    drain.push(2, {"loss": jnp.float32(0.25)})
    assert drain.poll() == [], "step 1 is not finished, and step 2 comes after it"
    gate.event.set()
    assert [(r.step, r.values) for r in drain.flush()] == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]
    assert drain.poll() == []


def test_what_the_loop_does_between_two_steps_is_no_time_of_the_next(drain):
    drain.push(1, {"loss": jnp.float32(1)})
    drain.add({"validation_loss": jnp.float32(2)})
    began = time.perf_counter()  # a sample, say
    drain.excuse()
    drain.push(2, {"loss": jnp.float32(3)})
    first, second = drain.flush()
    assert first.values == {"loss": 1.0, "validation_loss": 2.0}
    assert first.done <= began <= second.idle_from <= second.done


def test_no_step_ends_before_the_one_before_it_though_the_thread_is_late():
    gate, late = Gate(), threading.Event()
    drain = Drain(finished=lambda record: late.wait(30) if record.step == 1 else None)
    drain.push(1, {"loss": jnp.float32(1)})
    second = gate.metrics(2)
    drain.push(2, second)
    gate.event.set()
    jax.block_until_ready(second)
    drain.push(3, {"loss": jnp.float32(3)})
    late.set()
    assert all(record.seconds >= 0 for record in drain.flush())
    drain.close()


def test_only_too_far_ahead_waits_for_the_oldest_step(drain):
    gate, passed = Gate(), threading.Event()

    def loop():
        for step in (1, 2, 3):
            drain.push(step, gate.metrics(step) if step == 1 else {"loss": jnp.float32(step)})
        passed.set()

    thread = threading.Thread(target=loop)
    thread.start()
    assert not passed.wait(0.2), "three unfinished steps are more than two"
    gate.event.set()
    assert passed.wait(30)
    thread.join()


def test_an_evaluation_joins_the_record_of_its_step(drain):
    drain.push(1, {"loss": jnp.float32(2)})
    drain.add({"validation_loss": jnp.float32(3)})
    drain.push(2, {"loss": jnp.float32(1)})
    first, second = drain.flush()
    assert first.values == {"loss": 2.0, "validation_loss": 3.0}
    assert second.values == {"loss": 1.0}
    assert first.done <= first.released == second.idle_from <= second.done


def test_a_failure_on_the_device_reaches_the_loop(drain):
    def fail(x):
        raise ValueError("the device broke")

    broken = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x))
    with pytest.raises(Exception, match="the device broke"):
        drain.push(1, {"loss": broken(jnp.float32(0))})
        drain.flush()


@pytest.mark.parametrize(
    "waited, idle_from, expected",
    [
        ((1.0, 3.0), 2.0, 1.0),  # the device fell idle while the loop waited
        ((1.0, 3.0), 0.5, 2.0),  # it was idle before
        ((1.0, 3.0), 4.0, 0.0),  # it was busy all along
        (None, 2.0, 0.0),
        ((1.0, 3.0), None, 0.0),  # the first step waits for no one
    ],
)
def test_the_device_waits_for_data_only_while_it_is_idle(waited, idle_from, expected):
    record = Record(step=1, values={}, dispatched=3.5, waited=waited, done=6.0, idle_from=idle_from)
    assert record.data_wait == expected
    assert record.seconds == (2.5 if idle_from is None else 6.0 - idle_from)


def test_no_thread_outlives_a_closed_drain():
    """One that is inside JAX when the interpreter ends aborts the process."""
    drain = Drain()
    drain.push(1, {"loss": jnp.float32(1)})
    drain.flush()
    drain.close()
    assert "metrics" not in {thread.name for thread in threading.enumerate()}
