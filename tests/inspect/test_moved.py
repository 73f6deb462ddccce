import pytest

from tests.plan.small import small
from trellis.hardware.chips import target
from trellis.hardware.described import described_devices
from trellis.inspect.ledger import ledger_of
from trellis.inspect.memory import memory_of
from trellis.plan.prepared import prepare
from trellis.plan.quick import plan_of


@pytest.mark.slow
@pytest.mark.parametrize("on", ["v5e:2x4", "8xH100"])
@pytest.mark.parametrize("mode", ["explicit", "auto"])
def test_one_reading_of_what_moves_serves_the_ledger_and_memory(mode, on):
    run, slice_ = small(mesh__data="4", mesh__model="2", layout__preset="fsdp_tensor", layout__mode=mode), target(on)
    prepared = prepare(run, slice_, described_devices(slice_))
    plan, program = plan_of(prepared, slice_), prepared.traced()
    assert plan.ledger.rows and plan.ledger == ledger_of(program, 1.0)
    assert plan.memory == memory_of(program, ahead=plan.times.ahead)
