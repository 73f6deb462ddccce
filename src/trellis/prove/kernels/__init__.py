"""What opaque kernels compute: references in numpy that stand for them when a program is executed here."""

from .cudnn import KERNELS as CUDNN
from .grouped import KERNELS as GROUPED
from .splash import KERNELS as SPLASH
