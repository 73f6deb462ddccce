"""Which variants of a run are worth a plan."""

import dataclasses

import pytest

from tests.plan.small import small
from trellis.hardware.chips import target
from trellis.inspect import Memory
from trellis.mesh import platform
from trellis.plan.advice import advice
from trellis.plan.candidate import Candidate, with_less_kept, writes_out, written_out
from trellis.plan.quick import quick_plan
from trellis.plan.search import search
from trellis.plan.sketch import Sketch, sketch
from trellis.recipes import load_run
from trellis.run.config import Remat, Run


@pytest.mark.slow
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


# A mixture of experts that is planned in a second, on four chips.
MIXTURE = {
    "model.layers": "2", "model.embed": "256", "model.mlp": "512", "model.heads": "4", "model.kv_heads": "2",
    "model.head_dim": "64", "model.vocab": "1024", "model.experts": "4", "data.sequence_length": "256",
    "batch_size": "16", "mesh.data": "4", "mesh.expert": "1", "scan_layers": "null",
}  # fmt: skip


def mixture(**options: str) -> Run:
    return load_run("mixtral_8x7b_v5p_64", MIXTURE | options)


def test_layers_whose_loop_nobody_asked_for_are_tried_written_out():
    assert writes_out(mixture()) and writes_out(mixture(scan_layers="false")) and writes_out(small())
    assert not writes_out(mixture(scan_layers="true"))
    assert not writes_out(small(mesh__stage="2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on", "layers", "few", "tried"),
    [("v5e:2x2", 2, 10**10, 1), ("4xH100", 2, 0, 0), ("4xH100", 17, 10**10, 0), ("4xH100", 17, 0, 1)],
)
def test_layers_are_tried_written_out_where_a_loop_copies(monkeypatch, on, layers, few, tried):
    """Those of GPUs are written out anyway if they or their weights are few."""
    monkeypatch.setattr(platform, "_FEW_WEIGHTS", few)
    where = target(on)
    run = small(model__layers=str(layers), mesh__data="4", remat__policy="saved")
    loop = Candidate(run, {}, sketch(run, where, {"data": 4}), quick_plan(run, where))
    found = written_out([loop], where, run)
    assert [(c.run.scan_layers, c.options) for c in found] == [(False, {"scan_layers": "false"})] * tried
    assert found == [] or quick_plan(found[0].run, where).seconds < loop.seconds
    assert written_out([dataclasses.replace(loop, run=dataclasses.replace(run, scan_layers=True))], where, run) == []


@pytest.mark.slow
@pytest.mark.parametrize("written", ["null", "false"])
def test_a_search_plans_the_fastest_also_with_layers_written_out(written):
    """Whatever the run says: its loops are planned first, and options are those that the run lacks."""
    where = target("v5p:2x2x1")
    run = mixture(scan_layers=written)
    found = search(run, where, most=2)
    by_scan = {scan: [c for c in found.candidates if c.run.scan_layers is scan] for scan in (None, False)}
    assert by_scan[None] and by_scan[False] and len(by_scan[False]) <= 2 + (written == "false")
    for c in found.candidates:
        assert c.plan is not None
        assert c.options.get("scan_layers") == {None: None, False: "false"}[c.run.scan_layers] or written == "false"
        assert c.options.get("scan_layers") == {None: "null", False: None}[c.run.scan_layers] or written == "null"
        again = load_run("mixtral_8x7b_v5p_64", MIXTURE | {"scan_layers": written} | dict(c.options))
        assert again == c.run, "options as they are told give the run that was planned"
    assert all(("written out" in c.layout) is (c.run.scan_layers is False) for c in found.candidates)
    for c in (by_scan[None][0], by_scan[False][0]):
        assert quick_plan(c.run, where).seconds == c.plan.seconds, "and what was promised of it"
    runs = [c.run for c in found.candidates]
    assert all(one != other for number, one in enumerate(runs) for other in runs[:number]), "none is planned twice"


@pytest.mark.slow
def test_a_plan_advises_to_write_layers_out_where_that_is_faster():
    where = target("v5p:2x2x1")
    run = dataclasses.replace(mixture(**{"data.sequence_length": "2048"}), remat=Remat(policy="saved"))
    plan = quick_plan(run, where)
    planned = lambda options: quick_plan(dataclasses.replace(run, scan_layers=options != "--scan_layers false"), where)
    said = [line for line in advice(plan, planned) if "--scan_layers false" in line]
    assert len(said) == 1 and "copies what kernels make for the backward pass" in said[0]
    assert not any("--scan_layers" in line for line in advice(planned("--scan_layers false"), planned))
