"""run.yaml: the exact resolved run on disk."""

from pathlib import Path
from typing import Any

from trellis.errors import UserError
from trellis.files import load_yaml, write_whole, yaml_problem
from trellis.run.config import Run
from trellis.run.schema import build, plain


def to_yaml(value: Any) -> str:
    """A configuration as YAML, every field written out. Lists of scalars stay on one line."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def lists(dumper: yaml.SafeDumper, items: list) -> yaml.Node:
        flow = not any(isinstance(item, dict | list) for item in items)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)

    Dumper.add_representer(list, lists)
    return yaml.dump(plain(value), Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120)


def write_run(run: Run, path: Path) -> None:
    """Writes a run to a file that `read_run` and `trellis train FILE.yaml` read back as the same value."""
    write_whole(path, to_yaml(run))


def read_run(path: Path) -> Run:
    """The run in a file that `write_run` wrote.

    Raises:
        UserError: it is not YAML, or does not fit, for instance because another version wrote it.
    """
    import yaml

    try:
        found = load_yaml(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            "A run's file must be valid YAML.",
            seen=yaml_problem(error),
            where=str(path),
            fix="use the copy that is in each checkpoint",
        ) from None
    try:
        return build(Run, found, origin=lambda name, *_: f"`{name}` in {path}")
    except UserError as error:
        if str(path) in error.where:
            raise
        raise UserError(error.rule, seen=error.seen, where=f"{error.where} in {path}", fix=error.fix) from None
