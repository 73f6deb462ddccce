"""The shape language: parse, print, annotations, checks. No mesh, no models."""

from .annotation import (
    ArrayType,
    DType,
    Stack,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    key,
    shaped,
    u8,
    u16,
    u32,
)
from .binding import Bindings, PendingSumError, TypeMismatch
from .checked import checked, checking
from .shape import Dim, NotationError, Shape, parse, parse_transition, spec_of
from .struct import abstract, specs, struct, types
from .transition import Step, kind_of, plan
from .typeof import short_dtype, typeof
