"""`trellis recipes`."""

import argparse
import inspect

from trellis.commands.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis recipes`."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="the recipe to print with every field written out")


def execute(args: argparse.Namespace) -> int:
    """`trellis recipes`."""
    from trellis.recipes import RECIPES, load_run
    from trellis.run.run_file import to_yaml

    if args.recipe is not None:
        print(to_yaml(load_run(args.recipe)), end="")
        return 0
    width = max(map(len, RECIPES))
    for name, function in RECIPES.items():
        print(f"{name:<{width}}  {inspect.cleandoc(function.__doc__ or '').splitlines()[0]}")
    return 0


COMMAND = Command(
    name="recipes",
    summary="list the recipes, or print one in full",
    description="Lists the recipes, or prints one in full, as a file for `trellis train FILE.yaml`.",
    arguments=arguments,
    execute=execute,
)
