"""Norms. They compute in float32, scale in the wider of their input's type and the scale's, and return the input's."""

import equinox as eqx
import jax.numpy as jnp

from trellis.named import Axis, NamedArray, rsqrt
from trellis.named.backend import type_of_all
from trellis.nn.initializers import constant
from trellis.nn.parameters import Bias, Scale
from trellis.nn.precision import in_type


class RMSNorm(eqx.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019, arXiv:1910.07467): `x / rms(x) * scale`, over the names of the
    scale. Where a mesh axis slices one of them, the mean square is summed over it.

    With a `center` the factor is `center + scale`, added and multiplied in float32: a scale in 16 bits is finer around
    0 than around 1.
    """

    scale: Scale
    eps: float = eqx.field(static=True)
    center: float = eqx.field(static=True, default=0.0)

    @staticmethod
    def init(axes: Axis | tuple[Axis, ...], eps: float, *, center: float = 0.0) -> "RMSNorm":
        """A norm over these axes whose factor begins at 1: its scale at `1 - center`."""
        return RMSNorm(constant(axes, 1.0 - center), eps, center)

    def __call__(self, x: NamedArray) -> NamedArray:
        wide = in_type(x, jnp.float32)
        wide = wide * rsqrt((wide * wide).mean(self.scale.names) + self.eps)
        scale = self.scale.astype(jnp.float32) + self.center if self.center else self.scale
        own = type_of_all(x.array.dtype, scale.array.dtype)
        return in_type(in_type(wide, own) * in_type(scale, own), x.array.dtype)


class LayerNorm(eqx.Module):
    """Layer norm (Ba et al., 2016, arXiv:1607.06450): `(x - mean) / deviation * scale + bias`, over the names of the
    scale."""

    scale: Scale
    bias: Bias | None
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(axes: Axis | tuple[Axis, ...], eps: float, *, bias: bool = True) -> "LayerNorm":
        """A norm over these axes with a scale of ones, and a bias of zeros if it has one."""
        return LayerNorm(constant(axes, 1.0), constant(axes, 0.0) if bias else None, eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        wide = in_type(x, jnp.float32)
        wide = wide - wide.mean(self.scale.names)
        wide = wide * rsqrt((wide * wide).mean(self.scale.names) + self.eps)
        own = type_of_all(x.array.dtype, self.scale.array.dtype)
        own = own if self.bias is None else type_of_all(own, self.bias.array.dtype)
        out = in_type(wide, own) * in_type(self.scale, own)
        return in_type(out if self.bias is None else out + in_type(self.bias, own), x.array.dtype)
