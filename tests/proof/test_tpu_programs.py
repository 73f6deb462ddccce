"""What libtpu writes, as the interpreter reads it."""

import ml_dtypes
import numpy as np
import pytest

from trellis.proof.interpreter import Failed, Interpreter, NotInterpreted

BYTES = "{0:T(1024)(128)(4,1)}"
JOINED = 'custom-call(%part0, %part1), custom_call_target="ConcatBitcast"'


def copied(whole: str, *cuts: tuple[int, int]) -> str:
    """An array of 3 x 16 x 128 numbers of two bytes each, copied as bytes in parts, and what is made of these."""
    parts = "".join(
        f"""
  start{i} = ((s8[12288]{BYTES}), s8[{end - begin}]{BYTES}, s32[]) slice-start(%bytes), slice={{[{begin}:{end}]}}
  part{i} = s8[{end - begin}]{BYTES} slice-done(%start{i})"""
        for i, (begin, end) in enumerate(cuts)
    )
    return f"""HloModule m
ENTRY main () -> bf16[3,16,128] {{
  x = bf16[3,16,128]{{2,1,0:T(8,128)(2,1)}} parameter(0)
  bytes = s8[12288]{BYTES} bitcast(%x){parts}
  ROOT whole = {whole}
}}
"""


@pytest.fixture
def x():
    numbers = np.random.default_rng(0).normal(size=(1, 3, 16, 128)).astype(ml_dtypes.bfloat16)
    return numbers.astype(np.float32)


@pytest.mark.parametrize("cut", [8192, 5120])
def test_an_array_that_is_copied_as_bytes(x, cut):
    text = copied(f"bf16[3,16,128]{{2,1,0:T(8,128)(2,1)S(1)}} {JOINED}", (0, cut), (cut, 12288))
    (found,) = Interpreter(text)([x])
    np.testing.assert_array_equal(found, x)


def test_bytes_read_in_another_order(x):
    """Two rows lie beside each other in each word: memory that is read row by row has every second number of a row."""
    text = copied(f"bf16[6144]{{0}} {JOINED}", (0, 8192), (8192, 12288))
    (found,) = Interpreter(text)([x])
    np.testing.assert_array_equal(found[0, :256], x[0, 0, :2].T.reshape(-1))


def test_bytes_that_are_no_numbers_any_more(x):
    parts = (0, 6144), (6144, 12288)
    reversed_ = copied("bf16[6144]{0} bitcast(%back)", *parts).replace(
        "  ROOT", f"  back = s8[12288]{BYTES} reverse(%bytes), dimensions={{0}}\n  ROOT"
    )
    with pytest.raises(NotInterpreted, match="bytes of several numbers as one"):
        Interpreter(reversed_)([x])
    added = copied(f"s8[6144]{BYTES} add(%part0, %part1)", *parts)
    with pytest.raises(Failed, match="add whole"):
        Interpreter(added)([x])


@pytest.mark.parametrize("parts", [((0, 8192), (8193, 12288)), ((0, 8192), (8191, 12288))])
def test_parts_that_are_not_all_of_it(x, parts):
    with pytest.raises(NotInterpreted, match="not all of an array, each once"):
        Interpreter(copied(f"bf16[3,16,128]{{2,1,0:T(8,128)(2,1)}} {JOINED}", *parts))([x])
