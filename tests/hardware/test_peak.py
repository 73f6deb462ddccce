import jax
import pytest

from trellis.hardware.chips import published_peak, target
from trellis.hardware.peak import matmul_peak, measure_matmul_peak, square


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("TPU v5 lite", 197.0),
        ("TPU v5p", 459.0),
        ("TPU v6 lite", 918.0),
        ("TPU v4", 275.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 125.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
    ],
)
def test_published(kind, tflops):
    assert published_peak(kind) == tflops * 1e12


@pytest.mark.slow
def test_measured_on_a_cpu():
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):  # as in the middle of a run
        flops = measure_matmul_peak("float32", jax.devices()[:2], size=128)
    assert 1e6 < flops < 1e15
    assert 1e6 < matmul_peak(jax.devices()[:1], "bfloat16") < 1e15


def test_what_is_measured_is_the_product_that_a_step_makes():
    """Of bfloat16 factors with a float32 sum: with a bfloat16 one XLA's CPU compiler multiplies in float32."""
    x = jax.ShapeDtypeStruct((8, 8), "bfloat16")
    assert jax.eval_shape(square, x).dtype == "float32"
    (product,) = [e for e in jax.make_jaxpr(square)(x).eqns if e.primitive.name == "dot_general"]
    assert {str(v.aval.dtype) for v in product.invars} == {"bfloat16"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("v5e:2x2", "TPU v5 lite"),
        ("v5p:2x2x1", "TPU v5p"),
        ("v6e:2x2", "TPU v6 lite"),
        ("8xA100", "NVIDIA A100-SXM4-80GB"),
        ("8xH100", "NVIDIA H100 80GB HBM3"),
        ("8xH200", "NVIDIA H200"),
        ("8xB200", "NVIDIA B200"),
    ],
)
def test_agrees_with_the_planner(name, kind):
    assert published_peak(kind) == pytest.approx(target(name).chip.bf16_flops, rel=1e-3)
