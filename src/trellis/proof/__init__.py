"""What was compiled is what was written: compiled programs of hardware that is not here, executed and compared."""

from trellis.proof.functions import prove
