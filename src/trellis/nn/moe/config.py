"""How tokens are kept evenly over experts, and how they get to them: a part of a run's file."""

import dataclasses
from typing import Literal

from trellis.choices import check_choices
from trellis.errors import UserError

# In even loads: beyond the number of experts there are no more tokens.
_MOST_ROOM = 1000

Way = Literal["auto", "dense", "grouped", "gather", "ragged", "slots", "hierarchical"]
Dispatch = Literal["mxfp8", "bits"]

# Marks that a policy keeps only if it names them, and that only some layouts have: experts gathered from other devices,
# and what the first exchange of the hierarchical way brought.
EXPERT_WEIGHTS, FAR_ROWS = "expert_weights", "far_rows"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are picked and weighed, kept evenly loaded, and reached."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes a router's scores positive: softmax lets experts compete, sigmoid scores each on its own. Set it to
    the value of an imported model; sigmoid suits many experts."""
    normalize: bool = True
    """Whether the weights of a token's experts add up to 1. Set false for one expert per token, whose weight would
    always be 1."""
    scale: float = 1.0
    """Factor on these weights. Set it to the value of an imported model."""
    groups: int = 1
    """Number of groups of the same size that the experts are in, neighbours together. Set it to the number of devices
    or hosts that share the experts, to limit how many of them a token is sent to."""
    groups_per_token: int = 1
    """How many of these groups a token's experts come from: those whose two best experts have the largest sum. Lower it
    to send tokens to fewer devices."""
    balance: float = 0.0
    """Weight of the load-balancing loss. Raise it, to 0.01 for example, if a few experts get most tokens."""
    balance_over: Literal["batch", "sequence"] = "batch"
    """What the experts' shares of tokens are counted over. With microbatches, counting over the batch costs another
    forward pass. Choose sequence if microbatches make counting over the batch expensive."""
    z_loss: float = 0.0
    """Weight of the squared log of the denominator of the router's softmax. Set it to 1e-3 or so if the router's
    logits grow."""
    bias_rate: float | None = None
    """How much each expert's bias, which only picks experts, moves towards an even load in a step; null for no biases.
    Set it, to 0.001 for example, to balance experts without a loss."""
    capacity: float | None = None
    """Room of each expert in each sequence, as a multiple of an even load; later tokens are dropped. null drops none.
    Set it, to 1.25 for example, if steps must take the same time whatever the router does."""
    way: Way = "auto"
    """How tokens get to their experts: gather, ragged or slots over the mesh axes of the experts; hierarchical goes
    once over the first of these and on along the others; grouped brings the experts' weights to the tokens; dense
    computes all experts for all tokens. Choose one if a plan says that it is faster than what auto takes."""
    slack: float = 1.5
    """Room of an exchange's buffers, as a multiple of an even load. What does not fit goes in further rounds. Raise it
    if exchanges often need further rounds; lower it if buffers are too large."""
    interleave: int = 1
    """Number of parts in which a device's sequences go through a layer side by side, so that rows of one part travel
    while another is computed. Set it to 2 if a plan says that a step waits for an exchange."""
    dispatch: Dispatch | None = None
    """Numbers in which tokens, and gradients of experts' results, go to experts: mxfp8, e4m3 in blocks of 32, takes
    about half the bytes of bfloat16. What comes back is not rounded. null sends everything in the type of the rest;
    bits, for checking, sends numbers the same way without rounding. Set mxfp8 if a plan says that a step waits for an
    exchange."""

    def __post_init__(self):
        check_choices(self)
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
                f"`{wrong[0]}` must be {least}.",
                seen=f"{wrong[0]}={getattr(self, wrong[0])}",
                where=f"model.routing.{wrong[0]}",
                fix="use 0 to leave it out" if least == "0 or more" else more,
            )
        if self.interleave < 1:
            raise UserError(
                "`interleave` must be 1 or more.",
                seen=f"interleave={self.interleave}",
                where="model.routing.interleave",
                fix="use 1 for all sequences together, 2 to exchange one half while the other is computed",
            )
        if not self.scale > 0:
            raise UserError(
                "`scale` must be more than 0.",
                seen=f"scale={self.scale}",
                where="model.routing.scale",
                fix="use 1, or the scale of the imported model",
            )
        if self.groups < 1:
            raise UserError(
                "`groups` must be 1 or more.",
                seen=f"groups={self.groups}",
                where="model.routing.groups",
                fix="use 1 for no groups",
            )
        if not 1 <= self.groups_per_token <= self.groups:
            raise UserError(
                "`groups_per_token` must be from 1 to the number of groups.",
                seen=f"groups_per_token={self.groups_per_token}, groups={self.groups}",
                where="model.routing.groups_per_token",
                fix=f"use 1 to {self.groups}",
            )
        if self.z_loss and self.scores == "sigmoid":
            raise UserError(
                "The z-loss needs softmax scores, since sigmoids have no denominator.",
                seen=f"z_loss={self.z_loss}, scores=sigmoid",
                where="model.routing.z_loss",
                fix="use 0",
            )
