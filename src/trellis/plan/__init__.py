"""Plans of a run for hardware that is not here."""

from trellis.hardware.chips import chips as chips
from trellis.hardware.chips import target as target
from trellis.plan.quick import Plan as Plan
from trellis.plan.quick import quick_plan as quick_plan
from trellis.plan.search import search as search
