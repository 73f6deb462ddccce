"""Costs for the compiler of GPUs: what each instruction of a step takes, and a step scheduled by them."""

import dataclasses
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractMesh

from trellis.commands.line import main
from trellis.errors import UserError
from trellis.hardware.chips import target
from trellis.inspect.compiled import program_of
from trellis.plan import costs
from trellis.plan.compile import Compiled
from trellis.plan.costs import costs_said, costs_text, schedule_by_costs
from trellis.plan.estimates import estimates
from trellis.plan.quick import quick_plan
from trellis.plan.verdict import Verdict
from trellis.recipes import load_run
from trellis.train.compilation import COSTS, options_for

GPU = (Path(__file__).parents[1] / "inspect" / "gpu.hlo").read_text()
MESH = AbstractMesh((4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def plan():
    return quick_plan(load_run("tiny", {"mesh.data": "4", "mesh.model": "2"}), target("8xH100"))


@pytest.mark.slow
def test_rows_that_sparsecores_gather_take_time_as_far_as_nothing_hides_them():
    on_tpu = quick_plan(load_run("tiny", {"mesh.data": "4", "mesh.model": "2"}), target("v6e:2x4"))
    text = (Path(__file__).parents[1] / "inspect" / "sparsecores.hlo").read_text()
    text = text.replace("negate(%x)", 'negate(%x), backend_config={"window_config":{"estimated_cycles":"1"}}')
    known, rate = estimates(on_tpu, text, MESH), on_tpu.target.chip.streaming_bandwidth
    ((gather, runs),) = known.gathers
    assert (gather.name, runs) == ("offloaded", 1)
    assert known.names_of(known.program.by_name["begun"]).count("offloaded") == 1
    alone = estimates(on_tpu, text.replace('async_execution_thread="sparsecore", ', ""), MESH)
    assert not alone.gathers and alone.kernels == pytest.approx(known.kernels + 2 * 6 * 4 * 4 / rate)
    waited = known.replay().waits["offloaded"]
    assert waited == pytest.approx(max(0.0, 2 * 6 * 4 * 4 / rate - known.scheduled))


def costs_in(text: str) -> dict[str, float]:
    found = re.findall(r'^costs \{ name: "([^"]+)" cost_us: ([\d.]+) \}$', text, re.M)
    assert len(found) == len(text.splitlines())
    return {name: float(cost) for name, cost in found}


@pytest.mark.slow
def test_instructions_of_a_gpu_together_take_as_long_as_the_plan_s_computation(plan):
    known = estimates(plan, GPU, MESH)
    assert known.scheduled is None and known.kernels < plan.times.computation
    assert known.replay().computing == pytest.approx(plan.times.computation - known.kernels)
    gemm = program_of(GPU).by_name["gemm"]
    assert known.computing(gemm) == pytest.approx(plan.times.computation - known.kernels)  # there is nothing else
    exposed = sum(known.replay().waits.values())
    assert exposed == pytest.approx(sum(sent.seconds for sent in known.sending.values()))  # each ends where it starts


@pytest.mark.slow
def test_costs_are_of_every_instruction_in_microseconds(plan):
    known = estimates(plan, GPU, MESH)
    found = costs_in(costs_text(known))
    assert set(found) == {i.name for i, _, _ in known.program.walk()}
    assert found["gemm"] == pytest.approx(1e6 * known.computing(known.program.by_name["gemm"]), abs=1e-3)
    wire = {row.kind: row for _, row in known.found}["all-gather"]
    takes = plan.links.seconds(wire.wire, ("data",), "all-gather")
    assert found["all-gather-start"] == pytest.approx(1e6 * takes, abs=1e-3)
    assert found["all-gather-done"] == found["product"] == 0.0


def test_a_wrapped_collective_s_cost_is_that_of_its_start(plan):
    line = next(line for line in GPU.splitlines(keepends=True) if " all-gather-start(" in line)
    inner = line.replace("all-gather-start(%param.2)", "all-gather(%p)").replace(
        "%all-gather-start = (", "ROOT %ag = ("
    )
    inner = re.sub(r"= \(.*\}\) all-gather", "= bf16[1024,1024]{1,0} all-gather", inner)
    body = f"%async (p: bf16[256,1024]) -> bf16[1024,1024] {{\n  %p = bf16[256,1024]{{1,0}} parameter(0)\n{inner}}}\n\n"
    start = re.sub(r"all-gather-start\(%param.2\).*", "async-start(%param.2), calls=%async", line)
    text = GPU.replace(line, start).replace("%add (x", body + "%add (x", 1)
    text = text.replace("all-gather-done(", "async-done(")
    plain, wrapped = (costs_in(costs_text(estimates(plan, each, MESH))) for each in (GPU, text))
    assert "async-start" in text
    assert wrapped["all-gather-start"] == plain["all-gather-start"] > 0.0


def compiled(options: dict[str, str], text: str = GPU) -> Compiled:
    return Compiled(text, {"arguments": 0}, 1.0, False, 0.0, (), {}, options)


def verdict(seconds: float | None, of: Compiled) -> Verdict:
    return Verdict(of, None, None, None, None, 0.0, 0.0, 0.0, {}, 0.0, 0.0, (), seconds, None)


class Compiler:
    """Compiles to what a test says: a time for each file of costs, and new names in each program."""

    def __init__(self, monkeypatch, *seconds: float | None):
        self.given: list[Path] = []
        self.seconds = seconds
        monkeypatch.setattr(costs, "compile_program", self.compile)
        monkeypatch.setattr(costs, "judge", lambda plan, prepared, found: verdict(seconds[len(self.given) - 1], found))

    def compile(self, prepared, where, *, options, progress):
        self.given.append(Path(options[COSTS]))
        costs_in(self.given[-1].read_text())  # it is there, and whole
        text = GPU.replace("%gemm", f"%gemm.{len(self.given)}")
        found = compiled(options, text)
        return found if self.seconds[len(self.given) - 1] else dataclasses.replace(found, text="", excess=1.0)


PREPARED = SimpleNamespace(layout=SimpleNamespace(mesh=MESH), run=SimpleNamespace(name="tiny"))


def test_the_fastest_of_a_few_rounds_is_kept_with_its_file_alone(plan, monkeypatch, tmp_path):
    compiler = Compiler(monkeypatch, 1.8, 1.5, 1.6)
    first = verdict(2.0, compiled({"a": "b"}))
    best = schedule_by_costs(plan, PREPARED, first, tmp_path / "costs")
    assert best.seconds == 1.5 and len(compiler.given) == 3
    assert best.compiled.options == {"a": "b", COSTS: str(compiler.given[1])}
    assert [*(tmp_path / "costs").iterdir()] == [compiler.given[1]]
    assert "gemm.1" in compiler.given[1].read_text()  # by the names of the program of the round before
    words = costs_said(first, best)
    assert "1.50 s, 25.0% less than without" in words
    name, value = shlex.split(words.splitlines()[-1])
    run = load_run("tiny", {"compiler_options.a": "b", name.removeprefix("--"): value})
    assert dict(run.compiler_options) == best.compiled.options  # pasted, it leaves the run's own


@pytest.mark.parametrize("seconds", [(2.5, 2.5, 2.5), (None,)], ids=["slower", "without room"])
def test_what_is_no_faster_leaves_nothing(plan, monkeypatch, tmp_path, seconds):
    compiler = Compiler(monkeypatch, *seconds)
    first = verdict(2.0, compiled({}))
    assert schedule_by_costs(plan, PREPARED, first, tmp_path) is first
    assert compiler.given and not [*tmp_path.iterdir()]
    assert "no faster" in costs_said(first, first)


def test_a_file_that_was_there_stays(plan, monkeypatch, tmp_path):
    before = tmp_path / "of another run.pbtxt"
    monkeypatch.setattr(costs, "_path", lambda text, folder, name: before)
    before.write_text("")
    Compiler(monkeypatch, 2.5)
    first = verdict(2.0, compiled({}))
    assert schedule_by_costs(plan, PREPARED, first, tmp_path) is first
    assert before.exists()


def test_it_ends_where_a_program_s_costs_are_those_before(plan, monkeypatch, tmp_path):
    compiler = Compiler(monkeypatch, 1.8, 1.7, 1.6)
    monkeypatch.setattr(costs, "costs_text", lambda known: 'costs { name: "a" cost_us: 1.000 }\n')
    assert schedule_by_costs(plan, PREPARED, verdict(2.0, compiled({})), tmp_path).seconds == 1.8
    assert len(compiler.given) == 1


@pytest.mark.slow
def test_a_tpu_has_no_costs(tmp_path):
    plan = quick_plan(load_run("tiny", {"mesh.data": "4"}), target("v5e:2x2"))
    with pytest.raises(UserError, match="Costs can be used only with the compiler of GPUs") as error:
        schedule_by_costs(plan, PREPARED, verdict(1.0, compiled({})), tmp_path)
    assert "v5e:2x2" in str(error.value) and "--costs" in str(error.value)


def test_a_folder_that_cannot_be_written_is_an_error(plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="The folder for costs must be writable"):
        schedule_by_costs(plan, PREPARED, verdict(1.0, compiled({})), tmp_path / "file")


def test_the_command_refuses_costs_before_it_plans(capsys):
    assert main(["plan", "tiny", "--on", "8xH100", "--costs", "here"]) == 2
    assert "--costs without --compile" in capsys.readouterr().err
    assert main(["plan", "tiny", "--on", "v5e:2x2", "--compile", "--costs", "here"]) == 2
    out, err = capsys.readouterr()
    assert not out and "Costs can be used only with the compiler of GPUs" in err


def test_a_run_whose_file_of_costs_is_not_there_says_so(tmp_path):
    file = tmp_path / "costs.pbtxt"
    with pytest.raises(UserError, match="The file of costs to schedule a step by must exist") as error:
        options_for("cuda", {COSTS: str(file)})
    assert f"no {file}" in str(error.value) and "--costs FOLDER" in str(error.value)
    file.write_text("")
    assert options_for("gpu", {COSTS: str(file)})[COSTS] == str(file)
    assert options_for("tpu", {COSTS: "elsewhere"}) == {}  # another platform's
