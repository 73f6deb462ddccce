"""What JAX says of a whole program, in our words."""

import contextlib
import os
import re
import traceback
from collections.abc import Generator
from typing import NoReturn

from trellis.errors import TrellisError, shortened
from trellis.frames import users_line
from trellis.mesh.manual.refusals import raise_of_gradient
from trellis.mesh.meshes import MeshError
from trellis.named.arguments import unplaced
from trellis.notation import PendingSumError, TypeMismatch

# How JAX 0.10.2 to 0.12.0 refuses, while it compiles, functions whose definitions say nothing of slices.
_WHILE_COMPILING = ("select `which` must be scalar", "Use `.at[...].get(out_sharding=)`")
# How JAX 0.10.2 and 0.12.0 refuse partial sums that a compiled function holds as constants.
_HOLDS_PARTIAL_SUMS = ("device_indices_map doesn't work with unreduced", "sharding does not support UniqueIndexDomains")
# How they refuse, while they compile, an array of a mesh that none of a program's arguments is on.
_OF_A_MESH = re.compile(r"Length of device assignment .* of aval (\S+?\])")
# The mesh axes of a dimension, as JAX writes a type.
_SLICES = re.compile(r"@(\([^)]*\)|\w+)")


@contextlib.contextmanager
def jaxs_in_our_words(name: str, verb: str) -> Generator[None]:
    """Puts into our words that JAX's types refuse what a program does with plain arrays in slices, or its derivatives.

    Args:
        name: of the function that is traced or compiled inside.
        verb: what does so.

    Raises:
        MeshError: a result that lies nobody knows where, with the user's line and what to write instead.
        TypeMismatch: as `raise_of_derivatives`.
        PendingSumError: the function holds partial sums that were computed outside of it.
        MeshError: it makes an array of a mesh, on which none of its arguments is, while no mesh is in force.
    """
    try:
        yield
    except Exception as error:
        raise_in_our_words(error, name, verb)
        raise


def raise_in_our_words(error: Exception, name: str, verb: str) -> None:
    """As `jaxs_in_our_words`, of an error that was caught; lets any other error pass."""
    if isinstance(error, TrellisError):
        return
    raise_of_derivatives(error, name)
    if said := unplaced(error):
        _refuse_unplaced(error, said, verb)
    if any(words in str(error) for words in _HOLDS_PARTIAL_SUMS):
        raise PendingSumError(
            f"a compiled function cannot hold partial sums that were computed outside of it, got one that {name} reads "
            f"from around it, in {verb}: pass it as an argument, or settle it first"
        ) from error
    if found := _OF_A_MESH.search(str(error)):
        raise MeshError(
            f"a compiled function that makes an array of a mesh must be called while that mesh is in force, got "
            f"{found[1]} and none in force, in {verb}: call it inside `with layout:`"
        ) from error


def _refuse_unplaced(error: Exception, said: str, verb: str) -> NoReturn:
    line = users_line(error)
    if line is None and said.startswith(_WHILE_COMPILING):
        raise MeshError(
            "JAX can compute some functions, such as a QR decomposition, betainc or (in JAX 0.12) lgamma, only where "
            f"no mesh axis slices the array, got slices, in {verb}: let each device compute its own slices, with "
            "trellis.shard_map, or gather the name and go through it one by one, with tr.map instead of vmap"
        ) from error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(f"{os.sep}optax{os.sep}" in frame.f_code.co_filename for frame in frames):
        fix = "wrap the rule in trellis.optim.by_compiler, which leaves its slices to the compiler"
    else:
        fix = (
            "use named operations, jax.reshard the arrays first, or let each device compute its own slices, with "
            "trellis.shard_map"
        )
    where = f"{os.path.basename(line.filename)}:{line.lineno}" if line else verb
    raise MeshError(
        "JAX can compute an operation on plain arrays in slices only if it knows how the result is sliced, got one "
        f"where it does not ({shortened(said, 240)}), in {where}: {fix}"
    ) from error


def raise_of_derivatives(error: Exception, name: str) -> None:
    """Puts what JAX says when it differentiates a function into our words; lets any other error pass.

    Raises:
        TypeMismatch: JAX does not differentiate what a manual function makes of a copy, or a loop that ends by a
            condition; or a `jax.custom_vjp` or `jax.custom_jvp` gives a gradient or a tangent that lies elsewhere than
            it belongs.
    """
    if isinstance(error, ValueError) and str(error).startswith("Reverse-mode differentiation does not work for lax."):
        raise TypeMismatch(
            "a loop that ends by a condition has no gradient, got a while_loop (or a fori_loop whose bounds are values "
            f"of the program), in the gradient of `{name}`: use scan or fold over a fixed length, with where(...) for "
            "what is done, or give the loop stop_gradient(...) of what it starts with"
        ) from error
    if isinstance(error, ValueError | TypeError | NotImplementedError):
        raise_of_gradient(error, name)
        _raise_of_a_rule(error, name)


_ENDS = (
    "end the rule with shard({0}) for a parameter's, with shard({0}, 'compute') for an activation's, or with a reshard"
)

# What JAX says of a rule of one's own, a `custom_vjp`'s and a `custom_jvp`'s, and of what a function of `jax.vjp` is
# given; what it is to be; what to write; and whether a mapped function may have read it from around it.
_RULES = {
    r"rule produced an output of type (?P<given>\S+) corresponding to an input of type (?P<wanted>\S+)": (
        "a custom backward rule must return each gradient sharded like its argument, got {given} for an argument of "
        "{wanted}",
        _ENDS.format("gradient"),
        True,
    ),
    r"rule must produce primal and tangent outputs .*?Expected (?P<wanted>\S+) .*? got (?P<given>\S+)": (
        "a custom forward rule must return each tangent sharded like its result, got {given} for a result of {wanted}",
        _ENDS.format("tangent"),
        False,
    ),
    r"argument to VJP function: got (?P<given>\S+), but expected (?P<wanted>\S+) because": (
        "what jax.vjp gives must be called with a gradient sharded like the function's result, got {given} for a "
        "result of {wanted}",
        "end the function with shard(result, 'compute'), and call with shard(gradient, 'compute')",
        False,
    ),
}


# What JAX says of such rules where what they return has other names, or is of another number.
_RULES_OF_NAMES = {
    r"bwd output structure (?P<given>.*) for primal input structure (?P<wanted>.*)": (
        "a custom backward rule must return a gradient for each argument, of its names in their order",
        "rename or rearrange the gradient, or return None for an argument that has none",
    ),
    r"equal container \(pytree\) structures, but got (?P<wanted>.*) and (?P<given>.*) respectively": (
        "a custom forward rule must return a tangent for each result, of its names in their order",
        "rename or rearrange the tangent",
    ),
}
# The names of a named array, as JAX writes what a tree is made of.
_NAMES = re.compile(r"NamedArray\[\(\(([^)]*)\)")


def _raise_of_a_rule(error: Exception, name: str) -> None:
    """Puts JAX's error about a rule whose gradient or tangent is not what or where it should be into our words."""
    for said, (rule, fix) in _RULES_OF_NAMES.items():
        found = re.search(said, str(error), re.DOTALL)
        given, wanted = (_names(found[which]) if found else "" for which in ("given", "wanted"))
        if given != wanted:
            raise TypeMismatch(f"{rule}, got {given} for {wanted}, in the gradient of `{name}`: {fix}") from error
    for said, (rule, fix, around) in _RULES.items():
        found = re.search(said, str(error), re.DOTALL)
        types = {} if found is None else {key: text.rstrip(".,") for key, text in found.groupdict().items()}
        if types and types["given"] != types["wanted"] and _unsliced(types["given"]) == _unsliced(types["wanted"]):
            # What a mapped function reads from around it lies over the mapped mesh axes, which `shard` leaves out.
            mapped = "; what a function for vmap reads from around it, make an argument of that function"
            mapped = mapped if around and _SLICES.search(types["wanted"]) else ""
            raise TypeMismatch(f"{rule.format(**types)}, in the gradient of `{name}`: {fix}{mapped}") from error


def _unsliced(text: str) -> str:
    return _SLICES.sub("", text)


def _names(tree: str) -> str:
    """The names of a tree's named arrays, from JAX's text of it."""
    named = [" ".join(re.findall(r"\w+", names)) for names in _NAMES.findall(tree)]
    return " and ".join(f"'{names}'" for names in named) or "arrays without names"
