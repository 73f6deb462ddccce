"""Proves that what was compiled is what was written: executes programs for hardware that is not here, and compares."""

from trellis.proof.functions import prove
