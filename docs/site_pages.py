"""Pages of the site that are made when it is built: the README as its home, and what the code says of itself.

A hook of MkDocs. Links that leave `docs/` lead to the page that stands for the file; others lose the link and keep the
text, with the file's name after it, since a site has no source tree beside it.
"""

import argparse
import dataclasses
import functools
import importlib
import inspect
import posixpath
import re
import typing
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
HOME = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
GROUPS = """
    named.contract named.elementwise named.unary named.activations named.binary named.reduce named.along named.index
    named.update named.pieces named.reshape named.rearrange named.create named.random named.placing named.ahead
    named.saving mesh.reshard
""".split()
OPERATIONS = """# Named operations

Each is `tr.NAME`, and most are methods, `x.NAME`, too; `help(tr.NAME)` says the same. Three lines say what an operation
does with names and devices:

- **Names:** those of the result.
- **Gradient:** what it is, and what moves for it beyond the call itself.
- **Moves:** the collectives of a call under a layout. A name "is sliced" by `compute`, the layout's map of what is in
  use; an array "rests in slices" that `params` has and `compute` has not.

Where an operation frees a mesh axis and the layout gives it to a name that is left, the result is sliced over it, and
its gradient is gathered. What a program moves is in its [ledger](../inspect.md); tests hold these lines against it."""
FIELDS = """# Fields of a run

Every field is a line of YAML and an option of the command line, as in `--model.layers 8`. After its type comes the
value that it has in `starter`; for kinds that `starter` does not use, the default, if there is one.
`trellis train RECIPE --help` says the same of any recipe."""
FACES = re.findall(r"^\| `(trellis[\w.]*)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
# Files that have a page of their own.
PAGES = {
    **HOME,
    **{f"src/{face.replace('.', '/')}/__init__.py": f"reference/{face}.md" for face in FACES},
    "src/trellis/named/__init__.py": "reference/operations.md",
}


def on_files(files: Files, config) -> Files:
    """Adds the pages that are not files in `docs/`."""
    made = {page: (ROOT / name).read_text() for name, page in HOME.items()}
    made = {page: relinked(text, "") for page, text in made.items()}
    made |= {
        "reference/commands.md": commands_page(),
        "reference/fields.md": fields_page(),
        "reference/recipes.md": recipes_page(),
    }
    made |= {f"reference/{name}.md": face_page(name) for name in FACES} | {"reference/operations.md": operations_page()}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Links of pages in `docs/` to files outside of it."""
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{posixpath.dirname(page.file.src_uri)}")


def relinked(text: str, folder: str) -> str:
    """Links as they are in the repository, seen from a file in `folder`, as links of the site.

    >>> relinked("[a](docs/plan.md#x), [b](src/trellis/nn/__init__.py) and [c](https://c.org)", "")
    '[a](plan.md#x), [b](reference/trellis.nn.md) and [c](https://c.org)'
    >>> relinked("[rows](../benchmarks/results/moe.txt) of [`moe.py`](../benchmarks/moe.py)", "docs")
    'rows: `benchmarks/results/moe.txt` of `moe.py`'
    """

    def link(found: re.Match) -> str:
        image, label, target, anchor = found.groups()
        if "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        where = posixpath.relpath(path, "docs") if path.startswith("docs/") else PAGES.get(path)
        if where is None:
            return label if posixpath.basename(path) in label else f"{label}: `{path}`"
        back = posixpath.relpath(where, posixpath.relpath(folder or "docs", "docs"))
        return f"{image}[{label}]({back}{anchor or ''})"

    return LINK.sub(link, text)


def commands_page() -> str:
    """Every command's own help, without the fields of a run, which have a page."""
    from trellis.commands.line import commands

    parts = ["# Commands\n\nWhat `trellis COMMAND --help` prints."]
    for name, command in sorted(commands().items()):
        formatter = functools.partial(argparse.HelpFormatter, width=84)
        parser = argparse.ArgumentParser(f"trellis {name}", description=command.about, formatter_class=formatter)
        command.arguments(parser)
        parts.append(f"## trellis {name}\n\n```text\n{parser.format_help()}```")
    return "\n\n".join(parts)


def fields_page() -> str:
    """Every field of a run, with its type, the value that `starter` gives it, and its doc; then other kinds' fields."""
    from trellis.recipes.load import RECIPES
    from trellis.run.help import entries
    from trellis.run.schema import fields_of, show, tag_of

    run = RECIPES["starter"]()
    found, fields, shown = entries(run, {}), fields_of(type(run)), {type(run)}
    parts = [FIELDS]
    for section in dict.fromkeys(entry.section for entry in found):
        mine = [entry for entry in found if entry.section == section]
        if section:
            parts.append(f"## {section}\n\n{fields[section].doc}")
            shown |= {type(value) for value in parts_of(getattr(run, section))}
        parts += [defined(e.name, e.kind, e.now, "\n".join(e.doc)) for e in mine]
        for name in [section] if section else [entry.name for entry in mine]:
            for cls in kinds_in(fields[name].type):
                if cls not in shown:
                    shown.add(cls)
                    title = tag[1] if (tag := tag_of(cls)) else cls.__name__
                    parts.append(f"### {title}\n\n{inspect.getdoc(cls)}")
                    its = [f for f in fields_of(cls).values() if not tag or f.name != tag[0]]
                    parts += [defined(f.name, show(f.type), default_of(f), f.doc) for f in its]
    return "\n\n".join(parts) + "\n"


def defined(name: str, kind: str, now: str, doc: str) -> str:
    """A field as an entry of a list of definitions."""
    value, shown = f" &ensp;`{now}`" if now else "", doc.replace("<", "&lt;").replace("\n", "<br>")
    return f"`{name}` &ensp;*{kind}*{value}\n:   {shown}"


def default_of(field) -> str:
    """The value of a field that nobody sets, as text; "" where it has to be set, or has fields of its own."""
    from trellis.run.help import text_of
    from trellis.run.schema import REQUIRED, plain

    value = field.default
    return "" if value is REQUIRED or dataclasses.is_dataclass(value) else text_of(plain(value))


def kinds_in(kind) -> list[type]:
    """The dataclasses in a type: of a union, of a list's elements, and of their fields."""
    from trellis.run.schema import fields_of

    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [kind, *(cls for field in fields_of(kind).values() for cls in kinds_in(field.type))]
    return [cls for part in typing.get_args(kind) for cls in kinds_in(part)]


def parts_of(value) -> list:
    """A configuration and those in it."""
    if not dataclasses.is_dataclass(value):
        return []
    return [value, *(part for f in dataclasses.fields(value) for part in parts_of(getattr(value, f.name)))]


def operations() -> dict[str, list[str]]:
    """The named operations by the module that defines them: public functions that say what they move."""
    import trellis

    public = [*vars(trellis).values(), *(getattr(trellis.random, name) for name in trellis.random.__all__)]
    found: dict[str, list[str]] = {}
    for value in public:
        if inspect.isfunction(value) and "\nMoves: " in (inspect.getdoc(value) or ""):
            found.setdefault(value.__module__, []).append(value.__name__)
    return {
        module: sorted(set(names))
        for module, names in sorted(found.items(), key=lambda item: GROUPS.index(item[0].removeprefix("trellis.")))
    }


def documented(value) -> bool:
    """Whether a name of a public module has a docstring of its own to show."""
    return inspect.isroutine(value) or inspect.isclass(value)


def face_page(face: str) -> str:
    """A public module: what it says of itself, and each of its names that no page before it has."""
    module = importlib.import_module(face)
    before = {name: "operations" for names in operations().values() for name in names} if face == "trellis" else {}
    for other in FACES[: FACES.index(face)]:
        names = importlib.import_module(other).__all__
        before |= {n: other for n in names if vars(module).get(n, module) is vars(importlib.import_module(other))[n]}
    public = {name: getattr(module, name) for name in module.__all__ if before.get(name) != "operations"}
    parts = [f"# {face}", inspect.cleandoc(module.__doc__ or "")]
    if face == "trellis":
        parts.append("Operations of named arrays are on [their own page](operations.md).")
    besides = [f"[`{name}`]({before[name]}.md)" for name in public if name in before]
    besides += [f"`{name}`" for name, value in public.items() if name not in before and not documented(value)]
    parts += [f"Besides: {', '.join(besides)}."] if besides else []
    own = [value for name, value in public.items() if name not in before and documented(value)]
    return "\n\n".join([*parts, *(reference(value.__module__, value.__name__, 2) for value in own)]) + "\n"


def reference(module: str, name: str, level: int) -> str:
    """The docstring of a name, found where it is defined: a function may have the name of its module."""
    return f"::: {module}.{name}\n    options: {{heading_level: {level}, show_root_heading: true}}"


def operations_page() -> str:
    """Every named operation, by what it says of itself."""
    parts = [OPERATIONS]
    for module, names in operations().items():
        title, _, rest = (importlib.import_module(module).__doc__ or "").strip().partition("\n")
        parts.append(f"## {re.split('[:.]', title)[0]}\n\n{title}\n{rest}")
        parts += [reference(module, name, 3) for name in names]
    return "\n\n".join(parts) + "\n"


def recipes_page() -> str:
    """The recipes, by their docstrings."""
    from trellis.recipes.load import RECIPES

    rows = [f"## {name}\n\n{(recipe.__doc__ or '').strip()}" for name, recipe in sorted(RECIPES.items())]
    return "# Recipes\n\n`trellis recipes NAME` prints one in full.\n\n" + "\n\n".join(rows)
