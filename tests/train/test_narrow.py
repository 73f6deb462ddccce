"""Runs whose products are made in eight bits: the same on every layout, and to the bit where they are resumed."""

import pytest

from tests.train.small import curve, trellis

NARROW = ("--precision.products.attention", "int8", "--precision.products.mlp", "fp8")


def trained(capsys, run_file, folder, *options):
    code, _, said = trellis(capsys, "train", run_file, "--run-dir", folder, *options)
    assert code == 0, said
    return curve(folder)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_a_narrow_run_is_the_same_on_every_layout_and_when_resumed(run_file, tmp_path, capsys):
    one = ("--layout.preset", "single", *NARROW)
    whole = trained(capsys, run_file, tmp_path / "one", *one)
    assert trained(capsys, run_file, tmp_path / "parts", *one, "--until", "3") == whole[:3]
    assert trained(capsys, run_file, tmp_path / "parts", *one) == whole

    layout = ("--devices", "8", "--mesh.model", "2", "--layout.preset", "fsdp_tensor", *NARROW)
    many = trained(capsys, run_file, tmp_path / "many", *layout)
    plain = trained(capsys, run_file, tmp_path / "plain", "--layout.preset", "single")
    assert many[:2] == pytest.approx(whole[:2], rel=1e-5)
    assert many == pytest.approx(whole, rel=5e-3)  # a last bit that sums in another order may round to another number
    assert 1e-4 < abs(whole[-1] / plain[-1] - 1) < 0.02  # narrow, and near
