"""What was compiled is what was written: compiled programs of hardware that is not here, executed and compared."""

from trellis.prove.comparing import Output
from trellis.prove.finding import Finding
from trellis.prove.functions import prove
from trellis.prove.proof import Proof
