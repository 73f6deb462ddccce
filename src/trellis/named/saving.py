"""What is kept for the backward pass: marked where it is made, chosen by a policy."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

from trellis.named.arguments import shown
from trellis.named.axis import NamesError
from trellis.notation import TypeMismatch
from trellis.program.reading import IF_NAMED, OWN_MARK


def save(x, name: str, *, if_named: bool = False):
    """Marks a value that a policy may keep for the backward pass: `save(h, "attn_out")`.

    The mark is free: without a policy that names it, it changes nothing.

    Names: those of `x`.
    Gradient: elementwise; nothing moves.
    Moves: nothing.

    Args:
        x: an array, a named array or a tree of them.
        name: what policies call it.
        if_named: whether only a policy that names the mark keeps it, not one that keeps everything marked.
    """
    mark = f"{name}{IF_NAMED}" if if_named else name
    marked = jax.tree.map(lambda a: checkpoint_name(a, mark), x)
    # Or a compiler would move what comes back from the host before it has come: libtpu gathers it between hosts.
    return jax.lax.optimization_barrier(marked) if _offloads.value else marked


# Whether what is being traced may keep what it marks in the host's memory: JAX keys its traces by it.
_offloads = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """What is kept between the forward and the backward pass; the rest is recomputed.

    Attributes:
        names: marks kept on the device (None: everything that is marked).
        offload: marks kept in the host's memory instead (None: everything that is marked).
        products: also keep the results of products without batch dimensions.
        everything: keep all intermediate values, on the device (no recomputation at all).

    Raises:
        NamesError: not names; or names beside `everything`, which would have no effect.
    """

    names: tuple[str, ...] | None = ()
    offload: tuple[str, ...] | None = ()
    products: bool = False
    everything: bool = False

    def __post_init__(self):
        for field in ("names", "offload"):
            if isinstance(value := getattr(self, field), str):
                object.__setattr__(self, field, (value,))
            elif value is not None and not (isinstance(value, tuple | list) and all(isinstance(n, str) for n in value)):
                raise NamesError(
                    f"Keep takes a list of names, or None for everything that is marked, got {field}={shown(value)}, "
                    "in Keep: write Keep(names=('attn_out', 'mlp_out'))"
                )

        if self.everything and ((self.names, self.offload) != ((), ()) or self.products):
            raise NamesError(
                "everything is kept on the device, so nothing else can be chosen, got "
                f"{self!r}, in Keep: leave everything out, or the rest"
            )

    def policy(self):
        """The same as a `jax.checkpoint` policy."""
        return jax.checkpoint_policies.everything_saveable if self.everything else self._keep

    def _keep(self, primitive, *operands, **how):
        """Whether a value is kept: no, yes, or yes in the host's memory."""
        if primitive.name != "name":
            return self.products and _products(primitive, *operands, **how)
        name = how["name"].removesuffix(IF_NAMED)
        if name == PRODUCT:
            return self.products
        if name != how["name"] and name not in (*(self.names or ()), *(self.offload or ())):
            return False
        if self.offload is not None and name not in self.offload:
            return self.names is None or name in self.names
        to_host = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[name],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return to_host(primitive, *operands, **how)


# The mark of a product that is made of many.
PRODUCT = f"{OWN_MARK}product"


def _products(primitive, *operands, **how) -> bool:
    """Whether a value is a product without batch dimensions, or what a product's partial sums settle to.

    JAX cannot stack partial sums over the steps of a loop, and the sum over devices would be repeated.
    """
    if primitive.name == "dot_general" and (spec := how["out_sharding"]) is not None and spec.spec.unreduced:
        return False
    if primitive.name == "reshard":
        return bool(operands[0].sharding.spec.unreduced) and not how["dst_sharding"].spec.unreduced
    return bool(jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *operands, **how))


everything = Keep(everything=True)
nothing = Keep()
saved = Keep(names=None)
products = Keep(products=True)


def only(*names: str, offload: tuple[str, ...] = ()) -> Keep:
    """Keeps the given marks, `offload` ones in the host's memory, and recomputes the rest."""
    return Keep(names=names, offload=offload)


# Within it, parts of a layer that have a `checkpoint` of their own are fenced, if the layer is: `True` for one that is
# written out, of which compilers would keep what it makes again. JAX keys its traces by it, too.
layer_written_out = jax.make_user_context(False)


def checkpoint(fn: Callable, policy: Keep | Callable | None, *, fenced: bool | None = None) -> Callable:
    """The function with its intermediate values kept as the policy says (None: as JAX would).

    With `Keep(names=None)` this is explicit activation checkpointing: what is marked with
    `save` is kept, and nothing else.

    Args:
        fn: any function.
        policy: a `Keep`, or a policy of JAX's such as `jax.checkpoint_policies.dots_saveable`.
        fenced: hides from compilers that what is made again was made before; they would keep it. None: if it is part of
            a layer of `Stacked` that is written out. In a loop they do not see it.

    Raises:
        TypeMismatch: it is neither.
    """
    if policy is None or (isinstance(policy, Keep) and policy.everything):
        return fn
    if not isinstance(policy, Keep) and not callable(policy):
        raise TypeMismatch(
            f"a policy must be a Keep or one of jax.checkpoint's, got {policy!r}, in checkpoint: pass "
            "Keep(('hidden',)), Keep() or jax.checkpoint_policies.dots_saveable"
        )
    chosen = policy.policy() if isinstance(policy, Keep) else policy
    if isinstance(policy, Keep) and policy.offload != ():
        fn = _offloading(fn)
    return jax.checkpoint(fn, policy=chosen, prevent_cse=layer_written_out.value if fenced is None else fenced)


def _offloading(fn: Callable) -> Callable:
    @functools.wraps(fn)
    def offloading(*args, **kwargs):
        with _offloads(True):
            return fn(*args, **kwargs)

    return offloading
