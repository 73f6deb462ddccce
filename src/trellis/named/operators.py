"""The methods and operators of a named array, attached from the tables."""

from trellis.named import create, elementwise, index, reduce, reshape
from trellis.named.array import NamedArray
from trellis.named.elementwise import ELEMENTWISE

_OPERATORS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
    "mod": "mod", "pow": "power", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "left_shift", "rshift": "right_shift",
}  # fmt: skip
_COMPARISONS = {
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}  # fmt: skip


def _reflected(fn):
    return lambda self, other: fn(other, self)


for _dunder, _name in _OPERATORS.items():
    setattr(NamedArray, f"__{_dunder}__", ELEMENTWISE[_name])
    setattr(NamedArray, f"__r{_dunder}__", _reflected(ELEMENTWISE[_name]))
for _dunder, _name in _COMPARISONS.items():
    setattr(NamedArray, f"__{_dunder}__", ELEMENTWISE[_name])
NamedArray.__neg__ = elementwise.negative
NamedArray.__abs__ = ELEMENTWISE["abs"]
NamedArray.__invert__ = ELEMENTWISE["invert"]

_METHODS = {
    **reduce.REDUCTIONS,
    **reduce.ALONG,
    "argmax": reduce.argmax,
    "argmin": reduce.argmin,
    "top_k": reduce.top_k,
    "astype": elementwise.astype,
    "rename": reshape.rename,
    "rearrange": reshape.rearrange,
    "transpose": reshape.transpose,
    "unbind": reshape.unbind,
    "split": reshape.split,
    "broadcast_to": reshape.broadcast_to,
    "take": index.take,
    "tril": create.tril,
    "triu": create.triu,
    "clip": ELEMENTWISE["clip"],
    "__getitem__": index.index,
}
for _name, _fn in _METHODS.items():
    setattr(NamedArray, _name, _fn)
NamedArray.at = property(index.at)
