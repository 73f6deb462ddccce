"""Where each parameter is in a Hugging Face folder: its key, and the order of its dimensions there."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trellis.named.axis import NamesError
from trellis.nn.parameters import Parameter

Slices = Mapping[str, slice]

# The dimension along which two parameters share a tensor.
HALF = "half"


class Key(NamedTuple):
    """A parameter's key, with `{}` for a layer's number (and a second one for an expert's), and its dimensions there.

    Dimensions are written in order; `(heads head_dim)` are several in one. Two parameters may share a tensor and
    alternate along its last dimension, which is written `half`, as in `embed (mlp half)`.

    >>> Key("model.layers.{}.self_attn.q_proj.weight", "(heads head_dim) embed").groups
    (('heads', 'head_dim'), ('embed',))
    >>> Key("model.layers.{}.mlp.up_proj.weight", "mlp embed", first=3).name((2,))
    'model.layers.5.mlp.up_proj.weight'

    Attributes:
        text, dims: as above.
        half: which of the two a parameter is.
        first, step: the number in the folder of a parameter's first layer, and the step to the next one.
        dtype: of the tensor in every folder that is written; None for that of the others.
    """

    text: str
    dims: str
    half: int | None = None
    first: int = 0
    step: int = 1
    dtype: str | None = None

    def name(self, at: Sequence[int]) -> str:
        """The tensor's name, for one position along each leading name."""
        return self.text.format(*(self.first + self.step * i if place == 0 else i for place, i in enumerate(at)))

    @property
    def counts(self) -> int:
        """How many leading names of a parameter are numbers in the key: a tensor is one position along each."""
        return self.text.count("{}")

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        parts, inside = [], None
        for word in self.dims.replace("(", " ( ").replace(")", " ) ").split():
            if word == "(":
                inside = []
            elif word == ")":
                parts, inside = [*parts, tuple(inside)], None
            elif inside is None:
                parts.append((word,))
            else:
                inside.append(word)
        return tuple(parts)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape in the folder."""
        sizes = {**sizes, HALF: 2}
        return tuple(math.prod(sizes[name] for name in group) for group in self.groups)

    def write(self, array: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """A parameter's layer as the folder has it; if two share a tensor, this one's half, which alternates with the
        other in the last dimension.

        Args:
            array: the values.
            names: its dimensions' names.
        """
        order = [name for group in self.groups for name in group if name != HALF]
        sizes = dict(zip(names, array.shape, strict=True))
        array = array.transpose([names.index(name) for name in order])
        return array if self.half is not None else array.reshape(self.shape(sizes))

    def read(self, tensor: np.ndarray, sizes: Mapping[str, int], names: Sequence[str], part: Slices) -> np.ndarray:
        """Part of a parameter's layer; little more than that part of the tensor is read.

        Args:
            tensor: a view of the file.
            sizes: the parameter's sizes in the folder.
            names: the order of dimensions that is wanted.
            part: which part of each dimension.
        """
        order = [name for group in self.groups for name in group]
        sizes, half = {**sizes, HALF: 2}, 0 if self.half is None else self.half
        part = {**part, HALF: slice(half, half + 1)}
        outer = tuple(_covering(group, sizes, part) for group in self.groups)
        shape: list[int] = []
        for group, piece in zip(self.groups, outer, strict=True):
            inner = [sizes[name] for name in group[1:]]
            shape += [(piece.stop - piece.start) // math.prod(inner), *inner]
        split = tensor[outer].reshape(shape)
        firsts = {group[0] for group in self.groups}
        split = split[tuple(slice(None) if name in firsts else part[name] for name in order)]
        kept = split.transpose([order.index(name) for name in (*names, *(HALF,) * (HALF in order))])
        return kept[..., 0] if HALF in order else kept


def _covering(group: tuple[str, ...], sizes: Mapping[str, int], part: Slices) -> slice:
    """The slice of several dimensions in one that covers a part: whole in all dimensions but the first."""
    inner = math.prod(sizes[name] for name in group[1:])
    return slice(part[group[0]].start * inner, part[group[0]].stop * inner)


def key_of(keys: Mapping[str, Key], parameter: Parameter) -> Key:
    """The key of a parameter.

    Raises:
        NamesError: the family's table has none, or one with other names.
    """
    key = keys.get(parameter.path)
    own = parameter.names[key.counts :] if key is not None else ()
    if key is None or sorted(own) != sorted(name for group in key.groups for name in group if name != HALF):
        raise NamesError(
            f"every parameter needs a key with its dimensions, got {parameter.path} of '{' '.join(parameter.names)}' "
            f"for {key}, in the family's table of keys: add it there"
        )
    return key
