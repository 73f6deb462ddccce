"""Reads and writes Hugging Face folders (a model's configuration, weights, tokenizer), one tensor at a time."""

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trellis.errors import UserError
from trellis.files import naming
from trellis.hub.family import Family, family_in
from trellis.hub.keys import Key, key_of
from trellis.hub.tensors import DTYPES, WEIGHT_DTYPES, Tensor, TensorFile, in_shards, write_tensors
from trellis.mesh.meshes import sharding_of
from trellis.mesh.parts import with_one
from trellis.named import NamedArray, is_named
from trellis.nn.parameters import Parameter, parameters

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",  # those with names
    "generation_config.json",  # the tokens at which a text begins and ends
)
# By these a folder holds something else: an export would overwrite it, or be removed with it.
_OF_RUNS = ("run.yaml", "checkpoints", "manifest.json")
_OTHERS = (*_OF_RUNS, "*.safetensors", "config.json", *TOKENIZER_FILES)
# Buffers that older versions of `transformers` wrote beside the parameters: causal masks, rotary frequencies.
_MADE = re.compile(r"(^|\.)attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$|\.embed_positions$")
_UNEMBEDDING = "lm_head.weight"
# Positions along the names that a tensor's key counts: (layer,), (layer, expert), or () for a whole parameter.
At = tuple[int, ...]
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Folder:
    """A folder to read from.

    Args:
        path: the folder.
        families: those that its model may be of, by their names in `config.json`.

    Attributes:
        path: the folder.
        family: its model's.
        config: our configuration of its model.
        left_out: after loading, how many tensors were not read, since they predict tokens after the next.

    Raises:
        UserError: it is not there, or of an unknown kind.
    """

    def __init__(self, path: str | Path, families: Mapping[str, Family]):
        self.path = Path(path)
        config = self.path / "config.json"
        if (adapter := self.path / "adapter_config.json").is_file():
            raise UserError(
                "A Hugging Face folder must have the weights of a whole model, not what an adapter adds to them.",
                seen="an adapter",
                where=str(adapter),
                fix="merge it: AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload().save_pretrained(...)",
            )
        if not config.is_file():
            raise UserError(
                "A Hugging Face folder must have a config.json.",
                seen="no such file" if self.path.is_dir() else "no such folder",
                where=str(config),
                fix="use a folder that `save_pretrained` or `hf download` wrote",
            )
        self.hub = read_json(config)
        self.family = family_in(families, self.hub, str(config))
        self.config: Any = self.family.from_config_json(self.hub, str(config))
        self.left_out = 0
        self._files: dict[str, TensorFile] = {}
        self._place = self._weight_map()

    def load(self, model):
        """The model's parameters, read one layer at a time; for each device, only what it holds.

        Rows that pad the vocabulary are zeros. Shardings come from the model, not from the layout in force.

        Args:
            model: the model as `jax.ShapeDtypeStruct`s with shardings, or as arrays.

        Raises:
            UserError: a parameter is not in the folder, or has another shape there, or is not finite; or the folder has
                tensors that belong to no parameter.
        """

        keys = self.family.keys_of(self.config)
        self._check_taken([(p, key_of(keys, p)) for p in parameters(model)], keys)

        def load(parameter: Parameter) -> NamedArray:
            return NamedArray(self._load(parameter, key_of(keys, parameter)), parameter.names)

        with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):  # single devices' parts, then whole arrays
            leaves = [load(parameter) for parameter in parameters(model)]
        return jax.tree.unflatten(jax.tree.structure(model, is_leaf=is_named), leaves)

    def _load(self, parameter: Parameter, key: Key) -> jax.Array:
        leaf, names = parameter.leaf.array, parameter.names
        lead, own = names[: key.counts], names[key.counts :]
        sizes = dict(zip(names, leaf.shape, strict=True)) | {"vocab": self.config.vocab}
        indices = sharding_of(leaf).addressable_devices_indices_map(leaf.shape)
        parts = {d: _slices(names, leaf.shape, index) for d, index in indices.items()}

        def read(part: Mapping[str, slice], at: At) -> np.ndarray:
            text = key.name(at)
            tensor = self._tensor(text, key.shape(sizes))
            real = {n: slice(min(s.start, sizes[n]), min(s.stop, sizes[n])) for n, s in part.items()}
            with np.errstate(over="ignore"):
                array = np.asarray(key.read(tensor, sizes, own, real), leaf.dtype)
            self._check_finite(text, array)
            missing = [(0, (part[n].stop - part[n].start) - have) for n, have in zip(own, array.shape, strict=True)]
            return np.pad(array, missing) if any(after for _, after in missing) else array

        held: dict = {}
        for at in np.ndindex(*leaf.shape[: key.counts]):
            here = {
                d: p
                for d, p in parts.items()
                if all(p[n].start <= i < p[n].stop for n, i in zip(lead, at, strict=True))
            }
            piece = _each(here, lambda part, at=at: read({n: part[n] for n in own}, at))
            for d, part in here.items():
                one = jax.device_put(piece(d), d)
                place = tuple(i - part[n].start for n, i in zip(lead, at, strict=True))
                if not lead:
                    held[d] = one
                else:
                    sizes_here = tuple(part[n].stop - part[n].start for n in lead)
                    held[d] = _put(held[d], one, place) if d in held else _begin(one, sizes_here)
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding_of(leaf), [held[d] for d in parts])

    def _check_taken(self, keyed: Sequence[tuple[Parameter, Key]], keys: Mapping[str, Key]) -> None:
        """Refuses parameters without a tensor, and tensors that no parameter takes, before any is read.

        Three kinds of the latter may be there: buffers that are made from the configuration; if the unembedding is
        tied, a copy of the table of tokens under its name; and the layers for further tokens that `config.json` counts,
        which have no part in predicting the next (`left_out` counts their tensors).
        """
        taken = set()
        for parameter, key in keyed:
            for at in np.ndindex(*parameter.leaf.array.shape[: key.counts]):
                taken.add(self._find(key.name(at))[0])
        left = [name for name in self._place if name not in taken and not _MADE.search(name)]
        last = self.hub.get("num_hidden_layers", 0)
        further = tuple(f"model.layers.{last + i}." for i in range(self.hub.get("num_nextn_predict_layers") or 0))
        self.left_out = sum(name.startswith(further) for name in left)
        left = [name for name in left if not name.startswith(further)]
        table = self._find(keys["embedding"].text)[0]
        if _UNEMBEDDING in left:
            if not np.array_equal(self._read(_UNEMBEDDING), self._read(table)):
                raise UserError(
                    "A model whose unembedding is tied must have only one token table.",
                    seen=f"{_UNEMBEDDING} differs from {table}",
                    where=str(self.path),
                    fix='set "tie_word_embeddings": false in config.json, if the family has an unembedding of its own',
                )
            left.remove(_UNEMBEDDING)
        if left:
            raise UserError(
                "Every tensor in the folder must be a parameter of its model.",
                seen=", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else ""),
                where=str(self.path),
                fix="use config.json and weights of one model, without adapters, biases or layers that config.json "
                "does not mention",
            )

    def _find(self, text: str) -> tuple[str, Callable]:
        """The name of the folder's tensor that holds this key's values, and what to take of it."""
        # Some folders leave out the name that the model has within `...ForCausalLM`.
        if (name := next((n for n in (text, text.partition(".")[2]) if n in self._place), None)) is not None:
            return name, lambda tensor: tensor
        other, take = self.family.elsewhere(text) if self.family.elsewhere else (text, None)
        if take is not None and other in self._place:
            return other, take
        tied = text == _UNEMBEDDING and "tie_word_embeddings" not in self.family.fixed
        raise UserError(
            "The folder must have every parameter of its model.",
            seen=f"no {text}",
            where=str(self.path),
            fix="use config.json and weights of one model"
            + (', or set "tie_word_embeddings": true in config.json, if it is the table of tokens' if tied else ""),
        )

    def _read(self, name: str) -> np.ndarray:
        file = self._place[name]
        if file not in self._files:
            self._files[file] = TensorFile(self.path / file)
        found, where = self._files[file].entries.get(name), str(self.path / file)
        if found is None:
            rule, fix = "A file of weights must have the tensors that the index lists.", "download or export it again"
            raise UserError(rule, seen=f"no {name}", where=where, fix=fix)
        if found[0] not in WEIGHT_DTYPES:
            rule = "Imported weights must be stored in bfloat16, float16, float32 or float64."
            raise UserError(rule, seen=f"{name} in {found[0]}", where=where, fix="convert them first")
        return self._files[file].tensor(name)

    def _tensor(self, text: str, shape: tuple[int, ...]) -> np.ndarray:
        name, take = self._find(text)
        tensor = take(self._read(name))
        if tensor.shape != shape:
            raise UserError(
                "Weights must have the shapes that config.json sets.",
                seen=f"{name} of shape {tensor.shape}, which the configuration makes {shape}",
                where=str(self.path / self._place[name]),
                fix="use config.json and weights of one model",
            )
        return tensor

    def _check_finite(self, text: str, array: np.ndarray) -> None:
        """Refuses numbers that are not finite, or not in the type of our parameter: no loss of theirs is a number."""
        finite = np.isfinite(array)
        if not finite.all():
            raise UserError(
                "Imported weights must be finite.",
                seen=f"{array.size - np.count_nonzero(finite)} of {array.size} numbers of {text} are not finite in "
                f"{array.dtype}, such as {array[~finite][0]}",
                where=str(self.path / self._place[self._find(text)[0]]),
                fix="download or export them again"
                + (", or use --precision.params float32" if array.dtype == np.float16 else ""),
            )

    def _weight_map(self) -> dict[str, str]:
        if (self.path / INDEX).is_file():
            found = read_json(self.path / INDEX).get("weight_map")
            if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
                rule, fix = "An index of weight files must have a weight_map.", "download or export it again"
                raise UserError(rule, seen=f"{found!r:.40}", where=str(self.path / INDEX), fix=fix)
            if (self.path / WEIGHTS).is_file() and WEIGHTS not in found.values():
                raise UserError(
                    "A Hugging Face folder must have one set of weights.",
                    seen=f"{WEIGHTS}, and {INDEX} of other files",
                    where=str(self.path),
                    fix="remove the set that is not meant",
                )
            if absent := sorted(file for file in set(found.values()) if not (self.path / file).is_file()):
                rule, seen = "A folder must have the weight files that its index names.", f"no {', '.join(absent[:3])}"
                more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
                raise UserError(rule, seen=seen + more, where=str(self.path / INDEX), fix="download or export it again")
            return found
        if not (self.path / WEIGHTS).is_file():
            raise UserError(
                "Weights must be in safetensors: pickles are never read.",
                seen=f"neither {WEIGHTS} nor {INDEX}",
                where=str(self.path),
                fix="convert them: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
            )
        self._files[WEIGHTS] = TensorFile(self.path / WEIGHTS)
        return dict.fromkeys(self._files[WEIGHTS].entries, WEIGHTS)


def write_folder(
    to: str | Path,
    family: Family,
    config: Any,
    model,
    read: Callable[[Parameter, At], np.ndarray],
    *,
    dtype: str = "float32",
    positions: int,
    more: Mapping | None = None,
    shard_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Writes a model's configuration and weights, holding one tensor at a time. The vocabulary's padding is cut off.

    Args:
        to: the folder; created if absent.
        family: the model's.
        config: our configuration.
        model: the model; only its structure, names and shapes are looked at.
        read: gives a parameter's values at positions along its first names: those of one layer, of one expert of one
            layer, or, without positions, all of them.
        dtype: "float32", "bfloat16" or "float16".
        positions: the longest sequence, if the configuration does not say.
        more: other fields for `config.json`.
        shard_bytes: the size at which the next weight file begins.

    Returns:
        The files.

    Raises:
        UserError: Hugging Face has no form for this model, or the folder already holds a model, a tokenizer or a run.
    """
    to = Path(to)
    if there := [path for name in _OTHERS for path in sorted(to.glob(name))]:
        fix = "use another folder" + ("" if there[0].name in _OF_RUNS else ", or remove what is there")
        raise UserError(
            "An export needs a folder without another model, tokenizer or run.",
            seen=there[0].name,
            where=str(to),
            fix=fix,
        )
    contents = family.to_config_json(config, positions=positions, dtype=dtype) | dict(more or {})
    to.mkdir(parents=True, exist_ok=True)
    kind = np.dtype(DTYPES[DTYPE_NAMES[dtype]])
    keys = family.keys_of(config)
    made = [t for p in parameters(model) for t in _tensors(p, key_of(keys, p), config.vocab, kind, read)]
    tensors = _joined(made)
    known = {t.name for t in tensors}
    for key in family.zeros:
        if key.text not in known:
            shape = key.shape({"vocab": config.vocab})
            tensors.append(Tensor(key.text, shape, kind, lambda shape=shape: np.zeros(shape, kind)))
    shards = in_shards(tensors, shard_bytes)
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count > 1 else [WEIGHTS]
    files = [to / name for name in names]
    try:
        for path, shard in zip(files, shards, strict=True):
            write_tensors(path, shard)
    except BaseException:  # a part of the weights is of no use, and the same export would be refused because of it
        for path in files:
            path.unlink(missing_ok=True)
        raise
    if count > 1:
        weight_map = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": weight_map}
        files.append(_write(to / INDEX, index))
    return [*files, _write(to / "config.json", contents)]


def copy_tokenizer(folder: Path, to: Path) -> list[Path]:
    """Copies a folder's tokenizer files into another folder, and no others: it may hold a model too."""
    to.mkdir(parents=True, exist_ok=True)
    found = [path for name in TOKENIZER_FILES for path in sorted(folder.glob(name)) if path.is_file()]
    there = [path.relative_to(folder) for path in found]
    for name in there:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        with naming(to / name):
            shutil.copy(folder / name, to / name)
    return [to / name for name in there]


def write_tokenizer(serialized: str, end_of_document: str, to: Path, *, positions: int) -> list[Path]:
    """Writes a `tokenizers` tokenizer so that `AutoTokenizer` reads it.

    Args:
        serialized: the contents of `tokenizer.json`.
        end_of_document: the text of the token that ends a document.
        to: the folder.
        positions: the longest sequence.
    """
    to.mkdir(parents=True, exist_ok=True)
    with naming(to / "tokenizer.json"):
        (to / "tokenizer.json").write_text(serialized, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_of_document,
        "eos_token": end_of_document,
        "model_max_length": positions,
    }
    return [to / "tokenizer.json", _write(to / "tokenizer_config.json", config)]


def _tensors(parameter: Parameter, key: Key, vocab: int, dtype: np.dtype, read: Callable) -> list[tuple[int, Tensor]]:
    own = parameter.names[key.counts :]
    sizes = dict(zip(parameter.names, parameter.leaf.array.shape, strict=True))
    cut = tuple(slice(vocab) if name == "vocab" else slice(None) for name in own)
    shape = key.shape(sizes | ({"vocab": vocab} if "vocab" in sizes else {}))
    kind = dtype if key.dtype is None else np.dtype(DTYPES[DTYPE_NAMES[key.dtype]])

    def one(at: At) -> tuple[int, Tensor]:
        make = lambda: key.write(np.asarray(read(parameter, at))[cut], own)
        return key.half or 0, Tensor(key.name(at), shape, kind, make)

    return [one(at) for at in np.ndindex(*parameter.leaf.array.shape[: key.counts])]


def _joined(made: list[tuple[int, Tensor]]) -> list[Tensor]:
    """The tensors, with those that two parameters share joined into one."""
    found: dict[str, list[tuple[int, Tensor]]] = {}
    for half, tensor in made:
        found.setdefault(tensor.name, []).append((half, tensor))

    def one(parts: list[tuple[int, Tensor]]) -> Tensor:
        first = parts[0][1]
        if len(parts) == 1:
            return first
        ordered = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
        return first._replace(make=lambda: np.stack([t.make() for t in ordered], -1).reshape(first.shape))

    return [one(parts) for parts in found.values()]


def _each(parts: Mapping, read: Callable) -> Callable:
    """Reads each distinct part once, for all devices that hold it."""
    found: dict = {}

    def get(device):
        part = parts[device]
        at = tuple((s.start, s.stop) for s in part.values())
        if at not in found:
            found[at] = read(part)
        return found[at]

    return get


@functools.partial(jax.jit, static_argnums=1)
def _begin(first: jax.Array, counts: tuple[int, ...]) -> jax.Array:
    return _put(jnp.zeros((*counts, *first.shape), first.dtype), first, (0,) * len(counts))


@functools.partial(jax.jit, donate_argnums=0)
def _put(stacked: jax.Array, one: jax.Array, at: At) -> jax.Array:
    return with_one(stacked, one, at)


def _slices(names: tuple[str, ...], shape: tuple[int, ...], index: tuple) -> dict[str, slice]:
    return {n: slice(*s.indices(size)[:2]) for n, size, s in zip(names, shape, index, strict=True)}


def read_json(path: Path) -> dict:
    """The object in a JSON file of a folder.

    Raises:
        UserError: there is none in it.
    """
    try:
        found, wrong = json.loads(path.read_text(encoding="utf-8")), None
    except ValueError as error:
        found, wrong = None, str(error)
    if not isinstance(found, dict):
        raise UserError(
            "The folder's .json files must be valid JSON, an object each.",
            seen=wrong or f"{found!r:.40}",
            where=str(path),
            fix="download or export it again",
        )
    return found


def _write(path: Path, contents: Mapping) -> Path:
    with naming(path):
        path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
