"""The proof of any function of JAX with shardings."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trellis.proof.proof import Proof

# A right program differs by the order of its sums, about 1e-6 of a result's largest entry and at most 1.6e-5 over all
# recipes and layouts. A wrong sum usually differs by over 1e-2, and the smallest mistake made on purpose by 6.2e-5.
BOUND = 4e-5


def prove(
    fn: Callable,
    *args: Any,
    on: str,
    reference: Callable | None = None,
    options: Mapping[str, str] | None = None,
    bound: float = BOUND,
    explain: bool = True,
    seed: int = 0,
) -> "Proof":
    """Compiles a function for hardware that is not here, executes the compiled program here, and compares.

    It is compared with its own meaning, the program on whole arrays before a compiler has seen it, or with another
    function that says what it should be. Floats are held in float32, whatever their types, so that a difference is an
    error and not rounding.

    Args:
        fn: any function of JAX, jitted or not, whose results are arrays.
        *args: its arguments: arrays, named arrays, trees of them. Their shardings say where they lie, on a mesh of any
            devices, of which the target has as many; inside `with layout:` the layout comes along, and where neither
            says, the first mesh that the function names is taken. A `jax.ShapeDtypeStruct` of floats stands for numbers
            at random. Leaves that are not arrays are passed as they are.
        on: the hardware, as in `v5e:2x2` or `4xH100`.
        reference: computes the same on one device from the same arguments, without shardings; None for `fn`'s own
            meaning.
        options: of the compiler.
        bound: what deviations may be, as a share of a result's largest entry.
        explain: look for what made it wrong where it is: the pass of the compiler, and the first value.
        seed: of the numbers at random.

    Raises:
        UserError: `fn` is no function, the bound is not above 0, the mesh does not fill the target, its compiler is not
            installed or refuses the program, or the compiled program has something that the interpreter does not know.
        MeshError, TypeMismatch: JAX's types refuse what the function does with plain arrays in slices, or a rule for
            derivatives.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> x = jax.device_put(jnp.ones((8, 256)), NamedSharding(mesh, P("data", "model")))
    >>> prove(lambda x: jnp.sum(x * x, axis=1), x, on="v5e:2x2").proven
    True
    """
    # The planner and the models, which `import trellis` does without.
    from trellis.proof.programs import proof_of
    from trellis.proof.proof import interpreted

    how = dict(on=on, reference=reference, options=options or {}, bound=bound, explain=explain, seed=seed)
    with interpreted(f"`{getattr(fn, '__name__', 'the function')}` for {on}", "leave out what has it, or report it"):
        return proof_of(fn, *args, **how)
