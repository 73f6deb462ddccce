"""What is kept for the backward pass: said where it is made, chosen by a policy."""

import dataclasses

import jax
from jax.ad_checkpoint import checkpoint_name


def save(x, name: str):
    """Marks a value that a policy may keep for the backward pass: `save(h, "attn_out")`.

    The mark is free: without a policy that names it, it changes nothing.

    Args:
        x: an array, a named array or a tree of them.
        name: what policies call it.
    """
    return jax.tree.map(lambda a: checkpoint_name(a, name), x)


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """What is kept between the forward and the backward pass; the rest is recomputed.

    Attributes:
        names: marks kept on the device (None: everything that is marked).
        offload: marks kept in the host's memory.
        products: also keep the results of products without batch dimensions.
        everything: keep all intermediate values (no recomputation at all).
    """

    names: tuple[str, ...] | None = ()
    offload: tuple[str, ...] = ()
    products: bool = False
    everything: bool = False

    def policy(self):
        """The same as a `jax.checkpoint` policy."""
        policies = jax.checkpoint_policies
        if self.everything:
            return policies.everything_saveable
        kept = _marked if self.names is None else policies.save_only_these_names(*self.names)
        if self.offload:
            named = () if self.names is None else self.names
            kept = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(named),
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        if self.products:
            return policies.save_from_both_policies(kept, policies.dots_with_no_batch_dims_saveable)
        return kept


def _marked(primitive, *_, **__) -> bool:
    return primitive.name == "name"


everything = Keep(everything=True)
nothing = Keep()
saved = Keep(names=None)
products = Keep(products=True)


def only(*names: str, offload: tuple[str, ...] = ()) -> Keep:
    """Keeps the given marks, `offload` ones in the host's memory, and recomputes the rest."""
    return Keep(names=names, offload=offload)


def checkpoint(fn, policy: Keep | None):
    """The function with its intermediate values kept as the policy says (None: as JAX would).

    With `saved` this is explicit activation checkpointing: what is marked with
    `save` is kept, and nothing else.
    """
    if policy is None or policy.everything:
        return fn
    return jax.checkpoint(fn, policy=policy.policy(), prevent_cse=False)
