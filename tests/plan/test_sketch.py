"""Rough figures of a run's variants, before any is traced."""

import dataclasses

import pytest

from trellis.hardware.chips import target
from trellis.inspect.timeline import FRAGMENTATION
from trellis.plan.search import variants
from trellis.plan.sketch import sketch
from trellis.recipes import load_run
from trellis.run.config import Remat


@pytest.mark.slow
def test_of_mixtures_what_experts_make_is_kept_without_what_they_get():
    run, where = load_run("mixtral_8x7b"), target("8x8xH100")
    operands, gates = ("query", "key", "value", "attention"), ("mlp_gate", "mlp_up")
    kept = {variant.remat.names for variant, _ in variants(run, where)}
    assert {(*operands, *gates), ("attention", *gates)} < kept
    ways = [("none", ()), ("saved", ()), ("saved", (*operands, *gates)), ("saved", ("attention", *gates))]
    ways += [("saved", (*operands, "mlp_up")), ("full", ())]
    of = [
        sketch(dataclasses.replace(run, remat=Remat(policy=policy, names=names)), where, {"data": 64})
        for policy, names in ways
    ]
    assert [s.seconds for s in of] == sorted(s.seconds for s in of)
    assert [s.peak for s in of] == sorted((s.peak for s in of), reverse=True)
    dots = sketch(dataclasses.replace(run, remat=Remat(policy="dots")), where, {"data": 64})
    assert dots.seconds > of[3].seconds and dots.peak < of[3].peak  # it keeps no product of experts


@pytest.mark.parametrize("on, rows", [("8x8xH100", 1), ("v5p:4x4x4", 2)])
def test_kept_rows_are_of_tokens_where_kernels_gather_them(on, rows):
    run = load_run("mixtral_8x7b")
    given, gates = (
        sketch(dataclasses.replace(run, remat=Remat(policy="saved", names=names)), target(on), {"data": 64}).peak
        for names in (("attention", "mlp_rows"), ("attention", "mlp_gate"))
    )
    m, tokens = run.model, run.batch_size * run.data.sequence_length / 64 / run.parts
    more = 2.0 * m.layers * tokens * (rows * m.embed - m.experts_per_token * m.mlp)
    assert given - gates == pytest.approx((1 + FRAGMENTATION) * more)


def test_the_unembedding_is_multiplied_by_whether_it_is_the_table_or_not():
    run = load_run("llama_84m")
    of = lambda tied: dataclasses.replace(run, model=dataclasses.replace(run.model, tie_embeddings=tied))
    tied, own = (sketch(of(tied), target("1xH100"), {}) for tied in (True, False))
    assert tied.seconds == pytest.approx(own.seconds) and tied.peak < own.peak
