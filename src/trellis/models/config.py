"""Checks that models' configurations share."""

from trellis.errors import UserError


def check_positive(config, *fields: str) -> None:
    """Sizes are positive.

    Raises:
        UserError: naming the first that is not.
    """
    for field in fields:
        if getattr(config, field) < 1:
            raise UserError(
                "A model's sizes are positive.",
                seen=f"{field}={getattr(config, field)}",
                where=f"model.{field}",
                fix="use 1 or more",
            )


def check_whole_heads(config) -> None:
    """Each key head serves the same number of query heads, and heads have pairs of elements.

    Raises:
        UserError: with both numbers.
    """
    if config.heads % config.kv_heads:
        raise UserError(
            "Each key head serves the same number of query heads.",
            seen=f"heads={config.heads}, kv_heads={config.kv_heads}",
            where="model.kv_heads",
            fix=f"make kv_heads a divisor of {config.heads}",
        )
    if config.head_dim % 2:
        raise UserError(
            "Rotary positions turn pairs of elements.",
            seen=f"head_dim={config.head_dim}",
            where="model.head_dim",
            fix=f"use an even size, {config.head_dim + 1} for example",
        )


def check_heads_divide(config) -> None:
    """Heads divide the width between them.

    Raises:
        UserError: with both numbers.
    """
    if config.embed % config.heads:
        raise UserError(
            "Heads divide the width between them.",
            seen=f"embed={config.embed}, heads={config.heads}",
            where="model.heads",
            fix=f"use a divisor of {config.embed}",
        )


def check_rotary(config) -> None:
    """The turned part of a head is made of pairs and is no larger than the head.

    Raises:
        UserError: with both numbers.
    """
    head_dim = config.embed // config.heads
    if config.rotary_dim % 2 or config.rotary_dim > head_dim:
        raise UserError(
            "Rotary positions turn pairs of elements of a head.",
            seen=f"rotary_dim={config.rotary_dim}, embed / heads = {head_dim}",
            where="model.rotary_dim",
            fix=f"use an even size up to {head_dim}",
        )


def check_fraction(config, field: str) -> None:
    """A fraction is 0 or more and below 1.

    Raises:
        UserError: it is not.
    """
    if not 0 <= getattr(config, field) < 1:
        raise UserError(
            f"`{field}` is a fraction below 1.",
            seen=f"{field}={getattr(config, field)}",
            where=f"model.{field}",
            fix="use 0 for none",
        )


def check_positions(tokens, positions: int) -> None:
    """A sequence is no longer than the table of learned positions.

    Raises:
        UserError: with both lengths.
    """
    if tokens.shape["pos"] > positions:
        raise UserError(
            "A sequence is no longer than the model's learned positions.",
            seen=f"pos={tokens.shape['pos']}, positions={positions}",
            where="tokens",
            fix=f"cut the sequence to {positions}, or train a model with more positions",
        )
