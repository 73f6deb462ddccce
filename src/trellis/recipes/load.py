"""From a recipe's name or a YAML file, and options, to a run."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from trellis.errors import UserError, did_you_mean
from trellis.run.config import Run
from trellis.run.overrides import resolve

# Every public function that one of these modules defines is a recipe. A family's own lie beside its model.
_MODULES = ("trellis.recipes.starter", "trellis.recipes.gpt2", "trellis.recipes.llama", "trellis.recipes.mixtral")

RECIPES: dict[str, Callable[[], Run]] = {
    name: function
    for module in map(importlib.import_module, _MODULES)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
}


def load_run(target: str, options: Mapping[str, str] | None = None) -> Run:
    """The run that a recipe's name or a YAML file describes, with fields replaced by `--dotted.name value` options.

    A YAML file holds the fields of a `Run`. With `base: RECIPE` it holds only those that differ from the recipe's.

    >>> load_run("tiny", {"mesh.model": "2"}).mesh.model
    2

    Raises:
        UserError: there is no such recipe or file, or something in it does not fit.
    """
    if target in RECIPES:
        return resolve(Run, RECIPES[target](), options=options)
    if not target.endswith((".yaml", ".yml")):
        fix = did_you_mean(target, RECIPES)
        raise UserError("A run is a recipe or a YAML file.", seen=f"`{target}`", where="the first word", fix=fix)
    patch = read_yaml(Path(target))
    base = patch.pop("base", None)
    if base is not None and base not in RECIPES:
        fix = did_you_mean(str(base), RECIPES)
        raise UserError("A file is based on a recipe.", seen=f"base: {base}", where=target, fix=fix)
    return resolve(Run, RECIPES[base]() if base else None, patch=patch, source=target, options=options)


def read_yaml(path: Path) -> dict:
    """The fields in a YAML file.

    Raises:
        UserError: the file is not there, or no YAML, or holds something else than fields.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        fix = "give the path of a YAML file, or the name of a recipe: `trellis recipes`"
        raise UserError("A run's file can be read.", seen=error.strerror, where=str(path), fix=fix) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        seen = " ".join(str(error).split())
        raise UserError("A run's file is YAML.", seen=seen, where=str(path), fix="correct that line") from None
    if not isinstance(found, dict):
        fix = "write fields, as in steps: 100"
        raise UserError("A run's file holds fields.", seen=f"{type(found).__name__}", where=str(path), fix=fix)
    return found
