"""Plans of a run for hardware that is not here: memory, communication and time, from types or from the compiler.

`quick_plan` needs no compiler; `compile_run` asks the target's own, `judge` compares the two, and `schedule_by_costs`
has a GPU's compiler schedule by what the plan knows. Programs that plan several things about one step can use `prepare`
and `plan_of`. `plan_step` takes a train step of your own.
"""

from trellis.hardware.chips import Chip, Target, chips, target
from trellis.hardware.local import local_target
from trellis.hardware.measure import Machine, measure_machine
from trellis.plan.compile import Compiled, compile_run
from trellis.plan.costs import schedule_by_costs
from trellis.plan.prepared import Prepared, prepare
from trellis.plan.quick import Plan, plan_of, plan_step, quick_plan
from trellis.plan.search import search
from trellis.plan.verdict import Verdict, judge

__all__ = [
    "Chip",
    "Compiled",
    "Machine",
    "Plan",
    "Prepared",
    "Target",
    "Verdict",
    "chips",
    "compile_run",
    "judge",
    "local_target",
    "measure_machine",
    "plan_of",
    "plan_step",
    "prepare",
    "quick_plan",
    "schedule_by_costs",
    "search",
    "target",
]
