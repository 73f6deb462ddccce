"""Loads a run from a recipe's name or a YAML file, and options."""

import dataclasses
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from trellis.errors import UserError, did_you_mean
from trellis.files import load_yaml, typed, yaml_problem
from trellis.models import FAMILIES
from trellis.run.config import Run
from trellis.run.folder import to_import
from trellis.run.layouts import AXES
from trellis.run.overrides import named_in, resolve
from trellis.run.schema import fields_of

# Every public function without arguments that one of these modules defines is a recipe. A family's own are beside its
# model, in `recipes.py` or in the files of `recipes/`.
_BESIDE_MODELS = [f"trellis.models.{family}.recipes" for family in sorted(FAMILIES)]


def _modules() -> Iterator[ModuleType]:
    yield importlib.import_module("trellis.recipes.starter")
    for module in map(importlib.import_module, filter(importlib.util.find_spec, _BESIDE_MODELS)):
        yield module
        for part in pkgutil.iter_modules(getattr(module, "__path__", ())):
            yield importlib.import_module(f"{module.__name__}.{part.name}")


def _is_recipe(function: object, module: ModuleType) -> bool:
    own = inspect.isfunction(function) and function.__module__ == module.__name__
    return own and not function.__name__.startswith("_") and not inspect.signature(function).parameters


RECIPES: dict[str, Callable[[], Run]] = {
    name: function for module in _modules() for name, function in vars(module).items() if _is_recipe(function, module)
}
_TARGET = re.compile(r"trellis plan (\w+) --on (\S+)")


def hardware_of(recipe: str) -> str | None:
    """The hardware that a recipe's documentation plans it on; None if there is none.

    >>> hardware_of("llama_8b")
    '8xH100'
    """
    commands = dict(_TARGET.findall(RECIPES[recipe].__doc__ or ""))
    return commands.get(recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A run as it was asked for.

    Attributes:
        run: the run.
        given: names of the fields that the user set: dotted from the command line, outermost from a YAML file. The
            fields of a file that a run wrote to its folder, which are all of them, do not count.
        notes: a sentence for each thing that follows from them without having been asked for.
    """

    run: Run
    given: frozenset[str]
    notes: tuple[str, ...]


def load_run(target: str, options: Mapping[str, str] | None = None) -> Run:
    """The run that a recipe's name or a YAML file describes, with fields replaced by `--dotted.name value` options.

    A YAML file holds the fields of a `Run`. With `base: RECIPE` it holds only those that differ from the recipe's. A
    run's folder stands for the `run.yaml` in it.

    >>> load_run("tiny", {"mesh.model": "2"}).mesh.model
    2

    Raises:
        UserError: there is no such recipe or file, or something in it does not fit.
    """
    return load(target, options or {}).run


def load(target: str, options: Mapping[str, str]) -> Loaded:
    """The same as `load_run`, with how the run came about."""
    if target in RECIPES:
        base, patch = RECIPES[target](), {}
    else:
        path = run_file(target)
        if path.suffix not in (".yaml", ".yml"):
            texts = f"tokenize text first: trellis tokenize {target} --out stores/mine --train-bpe 512"
            known = _from_checkpoint(path) or to_import(path) or _around(path)
            fix = known or texts if path.is_dir() else did_you_mean(target, RECIPES)
            rule = "A run must be a recipe, a YAML file or a run's folder."
            raise UserError(rule, seen=f"`{target}`", where="the first argument", fix=fix)
        patch = read_yaml(path)
        recipe = patch.pop("base", None)
        if recipe is not None and str(recipe) not in RECIPES:
            fix = did_you_mean(str(recipe), RECIPES)
            raise UserError("The `base` of a file must be a recipe.", seen=f"base: {recipe}", where=target, fix=fix)
        base = RECIPES[recipe]() if recipe else None
    source = target if patch else ""
    whole = Path(target).is_dir() or patch.keys() >= fields_of(Run).keys()
    given = frozenset(named_in(Run, options)) | (frozenset() if whole else frozenset(patch))
    layout, meshes = ({**part} if isinstance(part := patch.get(n), Mapping) else {} for n in ("layout", "mesh"))
    named = {*meshes, *(str(name).removeprefix("mesh.") for name in given)}.intersection(AXES)
    note = None
    if base is not None and named and "layout.preset" not in given and "preset" not in layout:
        # Whether a product that is overlapped is sliced depends on the preset, which comes first.
        sliced = {name: value for name, value in layout.items() if name != "overlap"}
        texts = {name: text for name, text in options.items() if name != "layout.overlap"}
        note = _using(resolve(Run, base, patch={**patch, "layout": sliced}, source=source, options=texts), named)
        options = {**options, "layout.preset": "auto"} if note else options
    run = resolve(Run, base, patch=patch, source=source, options=options)
    return Loaded(run=run, given=given, notes=(note,) if note else ())


def run_file(target: str) -> Path:
    """The YAML file that a word names: the word itself, or the `run.yaml` of a run's folder."""
    inside = Path(target) / "run.yaml"
    return inside if inside.is_file() else Path(target)


def _from_checkpoint(folder: Path) -> str:
    """How to recover the run.yaml of a run's folder; "" if no checkpoint has a copy of it."""
    copies = sorted(folder.glob("checkpoints/*/run.yaml"))
    return f"copy it from a checkpoint: cp {typed(copies[-1])} {typed(folder)}" if copies else ""


def _around(folder: Path) -> str:
    """What to use in place of a folder in a run's folder; "" if it is in none."""
    run = next((above for above in folder.parents if (above / "run.yaml").is_file()), None)
    return f"use the run's folder: {typed(run)}" if run else ""


def _using(run: Run, named: set[str]) -> str | None:
    """Why a layout should be one that uses the mesh axes that the user named: the run's leaves one without work."""
    sizes, used = dataclasses.asdict(run.mesh), run.layout.used()
    more = dataclasses.replace(run.layout, preset="auto").used() - used
    idle = [axis for axis in AXES if axis in named and sizes[axis] != 1 and axis in more]
    if not idle:
        return None
    return f"layout.preset {run.layout.preset} -> auto, which uses the mesh axis {idle[0]}; --layout.preset sets it"


def read_yaml(path: Path) -> dict:
    """The fields in a YAML file.

    Raises:
        UserError: the file is not there, or not YAML, or holds something other than fields.
    """
    import yaml

    try:
        found = load_yaml(path.read_text("utf-8"))
    except OSError as error:
        fix = "use the path of a YAML file, or the name of a recipe: `trellis recipes`"
        raise UserError("A run's file must be readable.", seen=error.strerror, where=str(path), fix=fix) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        seen = yaml_problem(error)
        fix = _from_checkpoint(path.parent) or "correct that line"
        raise UserError("A run's file must be valid YAML.", seen=seen, where=str(path), fix=fix) from None
    if not isinstance(found, dict):
        fix = "write fields, as in steps: 100"
        raise UserError("A run's file must contain fields.", seen=f"{type(found).__name__}", where=str(path), fix=fix)
    return found
