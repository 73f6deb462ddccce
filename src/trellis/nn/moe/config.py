"""How tokens are kept evenly over experts, and how they get there: a part of a run's file."""

import dataclasses
from typing import Literal

from trellis.errors import UserError

# Of even loads: past the number of experts there are no more tokens.
_MOST_ROOM = 1000

Way = Literal["auto", "dense", "grouped", "gather", "ragged", "slots"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens are kept evenly over experts, and how they get there."""

    balance: float = 0.0
    """Weight of the load-balancing loss. Raise it, as to 0.01, where a few experts get most tokens."""
    balance_over: Literal["batch", "sequence"] = "batch"
    """What experts' shares are counted over. With microbatches, counting over the batch costs another forward pass.
    Choose sequence where microbatches make counting over the batch expensive."""
    z_loss: float = 0.0
    """Weight of the squared log of the denominator of the router's softmax. Set it to 1e-3 or so where the router's
    logits grow."""
    bias_rate: float | None = None
    """How much each expert's bias, which only picks experts, moves a step towards an even load; null has no biases. Set
    it, as to 0.001, to even out experts without a loss."""
    capacity: float | None = None
    """Room of each expert in each sequence, in tokens of an even load; later tokens are dropped. null drops none. Set
    it, as to 1.25, where steps must take the same time whatever the router does."""
    way: Way = "auto"
    """How tokens get to their experts: gather, ragged or slots over the mesh axes of the experts; grouped brings the
    experts' weights to the tokens; dense computes all experts for all tokens. Choose one where a plan says that it is
    faster than what auto takes."""
    slack: float = 1.5
    """Room of an exchange's buffers, in tokens of an even load. What does not fit goes in further rounds. Raise it
    where exchanges often need further rounds; lower it where buffers are too large."""

    def __post_init__(self):
        rules = {
            "balance": self.balance >= 0,
            "z_loss": self.z_loss >= 0,
            "bias_rate": self.bias_rate is None or self.bias_rate > 0,
            "capacity": self.capacity is None or 0 < self.capacity <= _MOST_ROOM,
            "slack": 0 < self.slack <= _MOST_ROOM,
        }
        if wrong := [name for name, holds in rules.items() if not holds]:
            least = "0 or more" if wrong[0] in ("balance", "z_loss") else "more than 0"
            least += f", and at most {_MOST_ROOM}" if wrong[0] in ("capacity", "slack") else ""
            more = "use 1.25 for a quarter more than an even load, or leave it out"
            raise UserError(
                f"`{wrong[0]}` is {least}.",
                seen=f"{wrong[0]}={getattr(self, wrong[0])}",
                where=f"model.routing.{wrong[0]}",
                fix="use 0 to leave it out" if least == "0 or more" else more,
            )
