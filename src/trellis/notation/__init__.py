"""The shape language: parse, print, annotations, checks. No mesh, no models."""

from .shape import Dim, NotationError, Shape, parse, parse_transition, spec_of

__all__ = ["Dim", "NotationError", "Shape", "parse", "parse_transition", "spec_of"]
