"""What opaque kernels compute: references in numpy that stand in for them when a program is executed here."""

from trellis.proof.interpreter.kernels.activations import KERNELS as ACTIVATIONS
from trellis.proof.interpreter.kernels.block_scaled import KERNELS as BLOCK_SCALED
from trellis.proof.interpreter.kernels.convolution import KERNELS as CONVOLUTION
from trellis.proof.interpreter.kernels.cudnn import KERNELS as CUDNN
from trellis.proof.interpreter.kernels.further import KERNELS as FURTHER
from trellis.proof.interpreter.kernels.grouped import KERNELS as GROUPED
from trellis.proof.interpreter.kernels.grouped import OPERATIONS as OPERATIONS
from trellis.proof.interpreter.kernels.splash import KERNELS as SPLASH
