"""Which variants of a run are worth a plan."""

import dataclasses

from tests.plan.small import small
from trellis.hardware.chips import target
from trellis.inspect import Memory
from trellis.plan.candidate import Candidate, with_less_kept
from trellis.plan.quick import quick_plan
from trellis.plan.sketch import Sketch


def test_what_would_be_fastest_but_does_not_fit_is_planned_with_less_kept():
    where = target("v5e:2x2")
    room, base = where.chip.hbm_bytes, quick_plan(small(), where)

    def one(policy, sketched, share, mesh="1", planned=None):
        """A candidate, of which the sketch says the seconds and the share of memory, and the plan others."""
        run = small(mesh__model=mesh, remat__policy=policy)
        plan = planned and dataclasses.replace(
            base,
            times=dataclasses.replace(base.times, seconds=planned[0]),
            memory=Memory((dataclasses.replace(base.memory.buffers[0], num_bytes=int(planned[1] * room)),)),
        )
        return Candidate(run, {}, Sketch(sketched, share * room), plan)

    sketched = [one("none", 4.0, 0.6), one("dots", 5.0, 0.5), one("saved", 5.5, 0.3), one("full", 6.0, 0.2)]
    large = dataclasses.replace(sketched[0], plan=one("none", 0, 0, planned=(2.0, 1.2)).plan)  # half of it, twice of it
    fits = one("full", 3.0, 0.3, mesh="2", planned=(2.9, 0.4))
    assert with_less_kept([large, fits], sketched, where) is sketched[2], "2.75 s, 0.6 of the memory; 3 s is too slow"
    assert with_less_kept([large], sketched, where) is sketched[2], "dots would take all of it"
    refused = dataclasses.replace(sketched[2], refused="why")
    assert with_less_kept([large, refused], sketched, where) is sketched[3]
    assert with_less_kept([large, refused, fits], sketched, where) is None
    assert with_less_kept([fits], sketched, where) is None, "another mesh is not like it"
