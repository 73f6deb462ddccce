"""The private names of JAX's splash attention that Trellis needs, in JAX 0.10.2 to 0.12.0."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr


@dataclasses.dataclass(frozen=True, slots=True)
class SplashTable:
    """Which blocks of a tile the splash kernel computes, forward and backward, and how; its arrays are NumPy's."""

    forward: Any
    queries: Any
    keys: Any
    settings: dict[str, Any]


def splash_table(mask, heads: int, block_sizes, logit_softcap: float | None, interpret: bool) -> SplashTable:
    """The tables of one mask for all heads. They are NumPy arrays, so any trace may close over them.

    The kernel's parts are private names of a module of `jax.experimental`, in JAX 0.10.2 to 0.12.0: its public function
    gives no log of the sums when a gradient is taken, and its gradient takes none.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    whole, one = masks.MultiHeadMask([mask] * heads), dict(head_shards=1, q_seq_shards=1)
    b = block_sizes
    forward, function = info.process_mask(whole, (b.block_q, b.block_kv), **one)
    fused = b.use_fused_bwd_kernel
    queries = None if fused else info.process_mask(whole, (b.block_q_dq, b.block_kv_dq), **one)[0]
    keys, _ = info.process_mask_dkv(whole, (b.block_q_dkv, b.block_kv_dkv), shrink_grid=not fused, **one)
    settings = dict(
        mask_value=kernel.DEFAULT_MASK_VALUE,
        is_mqa=False,
        block_sizes=b,
        residual_checkpoint_name=None,
        mask_function=function,
        attn_logits_soft_cap=logit_softcap,
        interpret=interpret,
    )
    return SplashTable(forward, queries, keys, settings)


def splash_forward(table: SplashTable, q, k, v, ids) -> tuple[jax.Array, jax.Array]:
    """The result, `batch heads pos head_dim`, and the log of the sums, `f32["batch heads pos"]`; queries are scaled."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    def one(q, k, v, ids):
        segments = None if ids is None else kernel.SegmentIds(*ids)
        with jax.numpy_dtype_promotion("standard"):
            return kernel._splash_attention(
                table.forward, None, None, q, k, v, segments, save_residuals=True, **table.settings
            )

    out, (log_sum,) = jax.vmap(one)(q, k, v, ids)
    return out, log_sum


def splash_backward(table: SplashTable, q, k, v, ids, pulled, log_sum, d_out):
    """The gradients of a tile; that of queries is in float32.

    Args:
        pulled: `f32["batch heads pos"]`, the product of the result and its gradient, over all keys.
        log_sum: likewise the log of the sums, over all keys.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    blocks, common = table.settings["block_sizes"], "mask_value is_mqa mask_function attn_logits_soft_cap interpret"
    common = {name: table.settings[name] for name in common.split()}
    common |= {name: getattr(blocks, name) for name in ("q_layout", "k_layout", "v_layout")}

    def gradients(q, k, v, ids, pulled, log_sum, d_out):
        segments = None if ids is None else kernel.SegmentIds(*ids)
        given = q, k, v, segments, None, log_sum, d_out, pulled
        with jax.numpy_dtype_promotion("standard"):
            d_q, d_k, d_v = kernel._splash_attention_bwd_dkv(
                *given,
                bq=blocks.block_q_dkv,
                bkv=blocks.block_kv_dkv,
                bkv_compute=blocks.block_kv_dkv_compute,
                mask_info=table.keys,
                use_fused_bwd_kernel=blocks.use_fused_bwd_kernel,
                **common,
            )
            if table.queries is not None:
                size = dict(bq=blocks.block_q_dq, bkv=blocks.block_kv_dq)
                d_q = kernel._splash_attention_bwd_dq(*given, mask_info=table.queries, **size, **common)
        return d_q, d_k, d_v

    return jax.vmap(lambda *args: _added_up(gradients, *args))(q, k, v, ids, pulled, log_sum, d_out)


def _added_up(function, *args):
    """A function's results; if the first is a sum over a kernel's blocks, these are added one by one in float32.

    XLA fuses additions, and runs a sum over a first dimension alone, at a fifth of the memory's rate (libtpu 0.0.42).
    """
    closed = jax.make_jaxpr(function)(*args)
    jaxpr, makes = closed.jaxpr, {v: e for e in closed.jaxpr.eqns for v in e.outvars}
    first, *rest = jaxpr.outvars
    total = makes[first]
    while total.primitive.name == "convert_element_type":
        total = makes[total.invars[0]]
    if total.primitive.name != "reduce_sum" or total.params["axes"] != (0,):
        d_q, *others = eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        return d_q.astype(jnp.float32), *others
    parts = makes[total.invars[0]]
    parts = parts.invars[0] if parts.primitive.name == "convert_element_type" else total.invars[0]
    program = jaxpr.replace(outvars=[parts, *rest])
    blocks, *others = eval_jaxpr(program, closed.consts, *jax.tree.leaves(args))
    return sum(blocks[i].astype(jnp.float32) for i in range(len(blocks))), *others
