"""`trellis recipes`."""

import argparse
import inspect

from ..train.run_file import to_yaml
from .load import RECIPES, load_run


def add_recipes_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis recipes`."""
    parser.description = "Lists the recipes, or prints one in full: a file that `trellis train FILE.yaml` takes."
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="the recipe to print with every field written out")


def run_recipes(args: argparse.Namespace) -> int:
    """`trellis recipes`."""
    if args.recipe is not None:
        print(to_yaml(load_run(args.recipe)), end="")
        return 0
    width = max(map(len, RECIPES))
    for name, function in RECIPES.items():
        print(f"{name:<{width}}  {inspect.cleandoc(function.__doc__ or '').splitlines()[0]}")
    return 0
