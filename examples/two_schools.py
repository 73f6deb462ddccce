"""The two schools of programming many devices, in one notation: whole arrays with shardings, and one device's slice.

    python examples/two_schools.py

The examples of the JAX chapter of "How To Scale Your Model": a product with shardings, and slice-and-average.
"""

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import trellis as tr  # noqa: E402
from trellis import f32, i32  # noqa: E402

BATCH, IN, OUT = 8, 64, 256


def product_of_whole_arrays() -> jax.Array:
    """First school: the product sums over a sliced dimension, the layout has the result whole along `y`."""
    x = tr.named(jnp.arange(BATCH * IN, dtype=jnp.float32).reshape(BATCH, IN) / IN, "batch in")
    w = tr.named(jnp.ones((IN, OUT), jnp.float32), "in out")

    def product(x, w):
        return tr.einsum("batch in, in out -> batch out", tr.square(x), w)

    layout = tr.Layout(tr.make_mesh(x=2, y=2, devices=jax.devices()[:4]), compute={"batch": "x", "in": "y"})
    with layout:
        x, w = tr.shard((x, w), "compute")
        print(tr.typeof(x), "times", tr.typeof(w))
        print(tr.ledger(product, x, w))
        out = tr.named_jit(product)(x, w)
        print("gives", tr.typeof(out))
    np.testing.assert_allclose(out.array, np.square(x.array) @ w.array, rtol=1e-5)
    return out.array


def product_of_slices() -> jax.Array:
    """Second school. The same program, one device's view: the partial sum is in the type until it is settled."""
    mesh = tr.make_mesh(x=2, y=2, devices=jax.devices()[:4])

    @tr.shard_map
    def product(x: f32["batch/x in/y"], w: f32["in/y out"]) -> f32["batch/x out"]:
        partial = tr.einsum("batch/x in/y, in/y out -> batch/x out +y", x * x, w)
        return tr.all_reduce("batch/x out +y -> batch/x out", partial)

    @tr.shard_map
    def forgotten(x: f32["batch/x in/y"], w: f32["in/y out"]) -> f32["batch/x out"]:
        return jnp.exp(tr.einsum("batch/x in/y, in/y out -> batch/x out +y", x * x, w))

    with jax.set_mesh(mesh):
        place = lambda a, text: jax.device_put(a, jax.NamedSharding(mesh, tr.parse(text).spec))
        x = place(np.arange(BATCH * IN, dtype=np.float32).reshape(BATCH, IN) / IN, "batch/x in/y")
        w = place(np.ones((IN, OUT), np.float32), "in/y out")
        print(tr.ledger(product, x, w))
        try:
            jax.eval_shape(forgotten, x, w)
        except tr.PendingSumError as error:
            print("Forgetting the sum is an error while tracing, not a wrong number:\n ", error)
        else:
            raise AssertionError("a forgotten sum went through")
        return jax.jit(product)(x, w)


def slice_and_average() -> jax.Array:
    """The mean of the first four elements of each slice: easy on a slice, awkward on the whole array."""
    mesh = tr.make_mesh(x=2, y=4)

    @tr.shard_map
    def average(a: i32["n/x/y"]) -> f32["4"]:
        first = a[:4].astype(jnp.float32) / 8
        return jax.lax.psum(first, ("x", "y"))

    with jax.set_mesh(mesh):
        a = jax.device_put(np.arange(512, dtype=np.int32), jax.NamedSharding(mesh, tr.parse("n/x/y").spec))
        out = jax.jit(average)(a)
        print(tr.ledger(average, a))
    np.testing.assert_allclose(out, np.arange(512).reshape(8, 64)[:, :4].mean(0))
    return out


def main() -> None:
    whole = product_of_whole_arrays()
    np.testing.assert_allclose(product_of_slices(), whole, rtol=1e-5)
    print("slice and average:", slice_and_average())


if __name__ == "__main__":
    main()
