"""What opaque kernels compute: references in numpy that stand for them when a program is executed here."""

from trellis.prove.interpreter.kernels.cudnn import KERNELS as CUDNN
from trellis.prove.interpreter.kernels.grouped import KERNELS as GROUPED
from trellis.prove.interpreter.kernels.splash import KERNELS as SPLASH
