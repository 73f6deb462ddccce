"""run.yaml: a resolved run on disk, exactly."""

from pathlib import Path
from typing import Any

from trellis.run.config import Run
from trellis.run.schema import build, plain


def to_yaml(value: Any) -> str:
    """A configuration as YAML, every field written out. Lists of scalars stay on one line."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def lists(dumper: yaml.SafeDumper, items: list) -> yaml.Node:
        flow = not any(isinstance(item, dict | list) for item in items)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)

    Dumper.add_representer(list, lists)
    return yaml.dump(plain(value), Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120)


def write_run(run: Run, path: Path) -> None:
    """Writes a run to a file that `read_run` and `trellis train FILE.yaml` read back as the same value."""
    path.write_text(to_yaml(run))


def read_run(path: Path) -> Run:
    """The run in a file that `write_run` wrote.

    Raises:
        UserError: it does not fit, for instance because another version wrote it.
    """
    import yaml

    return build(Run, yaml.safe_load(path.read_text()), origin=lambda name: f"`{name}` in {path}")
