"""The shape language: parse, print, annotations, checks. No mesh, no models."""

from trellis.frames import hide_frames
from trellis.notation.annotation import (
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
from trellis.notation.binding import Bindings, PendingSumError, TypeMismatch
from trellis.notation.checked import checked, checking
from trellis.notation.shape import Dim, NotationError, Shape, parse, parse_transition, spec_of
from trellis.notation.struct import struct, struct_shapes, struct_specs, struct_types
from trellis.notation.transition import Step, kind_of, plan
from trellis.notation.typeof import short_dtype, typeof

hide_frames(__file__)
