"""Where a computation will run, asked while it is traced."""

import jax


def platform_of(x: jax.Array) -> str:
    """The platform, "cpu", "cuda", "tpu" or another, that a value being traced will live on.

    A mesh says it, also one of devices that are not here (ahead-of-time compilation); without a mesh it is JAX's
    default backend.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    platform = getattr(device, "platform", None) or jax.default_backend()
    return {"gpu": "cuda"}.get(platform, platform)
