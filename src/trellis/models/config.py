"""Checks that every model's configuration shares."""

from trellis.errors import UserError


def check_positive(config, *fields: str) -> None:
    """Sizes are positive.

    Raises:
        UserError: naming the first that is not.
    """
    for field in fields:
        if getattr(config, field) < 1:
            raise UserError(
                "a model's sizes are positive",
                seen=f"{field}={getattr(config, field)}",
                where=f"model.{field}",
                fix="use 1 or more",
            )


def check_whole_heads(config) -> None:
    """Each key head serves the same number of query heads.

    Raises:
        UserError: with both numbers.
    """
    if config.heads % config.kv_heads:
        raise UserError(
            "each key head serves the same number of query heads",
            seen=f"heads={config.heads}, kv_heads={config.kv_heads}",
            where="model.kv_heads",
            fix=f"make kv_heads a divisor of {config.heads}",
        )
    if config.head_dim % 2:
        raise UserError(
            "rotary positions turn pairs of elements",
            seen=f"head_dim={config.head_dim}",
            where="model.head_dim",
            fix=f"use an even size, {config.head_dim + 1} for example",
        )
