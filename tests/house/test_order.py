"""The house rules that a program can check: import order, file length, private names, leftovers."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src" / "trellis"
ORDER = """
    figures notation program mesh named inspect collectives nn hub models data optim hardware run checkpoints train plan
    proof pages
""".split()
ABOVE_ALL = ("recipes", "commands")  # these import from every folder
BELOW_ALL = "choices cores errors files frames frozen interrupts _compat _splash".split()  # these import from none
FILES = sorted(SOURCE.rglob("*.py"))
WRITTEN = [*FILES, *(f for d in ("tests", "examples", "benchmarks") for f in sorted((ROOT / d).rglob("*.py")))]


def imports(tree: ast.AST, package: tuple[str, ...]) -> set[tuple[int, tuple[str, ...]]]:
    """Line and dotted name of everything a file of `package` imports, at any depth, relative imports resolved."""
    found: set[tuple[int, tuple[str, ...]]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(node.lineno, tuple(alias.name.split("."))) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            found |= {(node.lineno, (*module, alias.name)) for alias in node.names}
    return found


def rooms_in(tree: ast.AST, package: tuple[str, ...]) -> set[tuple[int, str]]:
    """Line and room of everything that a file of `package` imports from Trellis."""
    return {(line, name[1]) for line, name in imports(tree, package) if name[0] == "trellis" and len(name) > 1}


# `from trellis import Axis` needs all rooms that the public face re-exports from, and so the last of them; but not that
# of `trellis.prove`, a function, which brings its room in when it is called.
FROM_FACE = {room for _, room in rooms_in(ast.parse((SOURCE / "__init__.py").read_text()), ("trellis",))}
FACE = max(FROM_FACE.intersection(ORDER) - {"proof"}, key=ORDER.index)


def against_order(room: str, tree: ast.AST, package: tuple[str, ...]) -> list[str]:
    """The imports of a file in `room` that the order does not allow."""
    wrong = []
    for line, other in sorted(rooms_in(tree, package)):
        if other not in (*ORDER, *ABOVE_ALL, *BELOW_ALL):
            other = FACE  # one of its names
        if other == room or other in BELOW_ALL or room in ABOVE_ALL or room == "__init__":
            continue
        if room in BELOW_ALL or other not in ORDER or ORDER.index(other) > ORDER.index(room):
            wrong.append(f"line {line}: {room} imports {other}")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_import_order(file: pathlib.Path):
    parts = file.relative_to(SOURCE).with_suffix("").parts
    if "recipes" in parts:  # a family's recipes lie beside its model, and are recipes like all others
        parts = ("recipes", *parts[1:])
    assert parts[0] in (*ORDER, *ABOVE_ALL, *BELOW_ALL, "__init__", "__main__"), f"{parts[0]} has no place in the order"
    package = ("trellis", *file.relative_to(SOURCE).parent.parts)
    assert not against_order(parts[0], ast.parse(file.read_text()), package)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("from trellis.train import loop", ["line 1: nn imports train"]),
        ("def f():\n    import trellis.plan.search", ["line 2: nn imports plan"]),
        ("from ..models import llama", ["line 1: nn imports models"]),
        ("from .. import pages", ["line 1: nn imports pages"]),
        ("from trellis.named import Axis\nfrom . import linear\nfrom ..errors import UserError\nimport jax", []),
    ],
)
def test_the_check_itself(text: str, wrong: list[str]):
    assert against_order("nn", ast.parse(text), ("trellis", "nn")) == wrong


def test_names_of_the_public_face_are_for_rooms_above_it():
    tree = ast.parse("from trellis import Axis")
    assert against_order("named", tree, ("trellis", "named")) == [f"line 1: named imports {FACE}"]
    assert against_order("models", tree, ("trellis", "models")) == []


@pytest.mark.parametrize("file", sorted((SOURCE / "models").rglob("*.py")), ids=lambda f: str(f.relative_to(SOURCE)))
def test_models_are_written_in_the_public_language(file: pathlib.Path):
    """What a user's own model can import: `trellis` and `trellis.nn`; besides, other models, the hub's engine, and the
    check of a configuration."""
    allowed = {"trellis", "trellis.nn", "trellis.nn.moe", "trellis.hub", "trellis.choices"}
    if "recipes" in file.with_suffix("").parts:  # a recipe is a run
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("trellis"):
            assert node.module in allowed or node.module.startswith("trellis.models"), f"line {node.lineno}"
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("trellis.") for alias in node.names), f"line {node.lineno}"


def test_files_are_short():
    assert not [f"{f.relative_to(ROOT)}: {n} lines" for f in WRITTEN if (n := len(f.read_text().splitlines())) > 500]


def test_private_names_of_jax_live_in_one_file():
    private = re.compile(r"\bjax\._src\b")
    assert not [f for f in FILES if f != SOURCE / "_compat.py" and private.search(f.read_text())]


def test_what_platforms_want_is_behind_one_interface():
    """Besides the interface itself: who picks a kernel, or the width of what moves, by the platform that has it. A
    device's own word for its platform, of which JAX has two for a GPU, is read by the interface, and shown by what
    describes a machine."""
    asking = {str(f.relative_to(SOURCE)) for f in FILES if re.search(r"import .*\bplatform_of\b", f.read_text())}
    picking = {"nn/attention/dispatch.py", "nn/moe/dispatch.py", "nn/moe/grouped.py", "nn/moe/mixing.py"}
    assert asking == {"named/backend.py", *picking}
    own = re.compile(r"(?<!sys)(?<!trellis\.mesh)(?<!trellis\.hardware)\.platform\b|default_backend")
    reading = {str(f.relative_to(SOURCE)) for f in FILES if own.search(f.read_text())}
    assert reading == {"mesh/platform.py", "commands/doctor.py", "train/summary.py"}


def test_nothing_is_left_for_later():
    later = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    assert not [f for f in WRITTEN if later.search(f.read_text())]


def test_init_files_only_re_export():
    """A docstring, imports, `__all__`, `__version__`, and tables of names for imports on first use."""
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)
    for file in SOURCE.rglob("__init__.py"):
        nodes = [n for n in ast.parse(file.read_text()).body if not isinstance(n, allowed)]
        functions = [n.name if isinstance(n, ast.FunctionDef) else type(n).__name__ for n in nodes]
        assert set(functions) <= {"__getattr__", "__dir__"}, f"{file.relative_to(ROOT)} defines {functions}"


@pytest.mark.slow
def test_import_is_light():
    """`import trellis` brings in nothing that only some commands need."""
    heavy = "torch transformers tensorflow wandb ray datasets orbax zarr tokenizers huggingface_hub yaml".split()
    code = f"import sys, trellis; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


@pytest.mark.slow
def test_a_proof_is_brought_in_when_it_is_asked_for():
    code = "import sys, trellis; print([m for m in sys.modules if m.startswith(('trellis.plan', 'trellis.proof.'))])"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "['trellis.proof.functions']"


def defined(file: pathlib.Path) -> set[str]:
    """The public names that a file defines."""
    nodes = ast.parse(file.read_text()).body
    named = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assigned = {t.id for n in nodes if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    return {name for name in named | assigned if not name.startswith("_")}


def test_ten_files_lead_from_the_command_to_the_first_step():
    """The walk in ARCHITECTURE.md: each file is reached from one before it, by a name that it defines."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    part = text.partition("## From the command to the first step")[2].partition("\n## ")[0]
    walk = [SOURCE / name for name in re.findall(r"^\| `([\w/]+\.py)` \|", part, re.MULTILINE)]
    assert len(walk) == 10 and walk[0].name == "line.py" and walk[-1].name == "step.py"
    for number, file in enumerate(walk[1:], start=1):
        before = set(re.findall(r"\w+", "".join(other.read_text() for other in walk[:number])))
        assert defined(file) & before, f"{file.name} is not reached from the files before it"


def import_circles() -> list[list[str]]:
    """Groups of modules that import each other while they are loaded. Imports inside functions come later."""
    modules = {".".join(("trellis", *f.relative_to(SOURCE).with_suffix("").parts)): f for f in FILES}
    modules = {name.removesuffix(".__init__"): f for name, f in modules.items()}
    edges = {}
    for name, file in modules.items():
        package = tuple(name.split("."))[: None if file.name == "__init__.py" else -1]
        body = ast.Module(
            [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)], []
        )
        found = {".".join(parts) for _, parts in imports(body, package)}
        found = {n if n in modules else n.rpartition(".")[0] for n in found} & set(modules)
        # A module's own packages are loading already when it is.
        edges[name] = {n for n in found if not f"{name}.".startswith(f"{n}.")}
    while True:  # what imports nothing that is left is in no circle
        free = {name for name, others in edges.items() if not others & set(edges)}
        if not free:
            return [sorted(edges)] if edges else []
        edges = {name: others for name, others in edges.items() if name not in free}


@pytest.mark.slow
def test_no_import_runs_in_a_circle():
    assert not import_circles()


def test_no_two_files_of_a_room_differ_by_an_ending():
    """`fit` and `fitting`, `batch` and `batches`: nobody could say which holds what."""
    ending = re.compile(r"(?<=\w{3})(ations?|ings?|ions?|ers?|ed|es|e|s)$")
    rooms: dict[tuple[pathlib.Path, str], list[str]] = {}
    for file in FILES:
        if file.name != "__init__.py":
            rooms.setdefault((file.parent, ending.sub("", file.stem)), []).append(file.stem)
    assert not [names for names in rooms.values() if len(names) > 1]


def test_a_family_is_its_folder_and_its_name_in_one_list():
    """No code elsewhere imports one or asks for one by name; faces list what users import."""
    families = {f.parent.name for f in (SOURCE / "models").glob("*/hub.py")}
    known = re.compile(rf"\b({'|'.join(sorted(families))})\b")
    faces = {SOURCE / "models" / "__init__.py", SOURCE / "models" / "families.py", SOURCE / "recipes" / "__init__.py"}
    for file in FILES:
        text = file.read_text()
        if file not in faces and not families.intersection(file.relative_to(SOURCE).parts) and known.search(text):
            tree = ast.parse(text)
            words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            package = ("trellis", *file.relative_to(SOURCE).parent.parts)
            words |= {part for _, name in imports(tree, package) for part in name[:3]}
            assert not families & {w for w in words if isinstance(w, str)}, file.relative_to(SOURCE)


def test_programs_are_walked_in_one_place():
    """Others that go over equations rewrite them (a sum that is scattered onto another, a kernel's result, what a loop
    reads from around it), prepare a program that is to be read, or run each as one device would; what reads one asks
    `program/reading.py`."""
    walking = {str(f.relative_to(SOURCE)) for f in FILES if re.search(r"\beqns\b", f.read_text())}
    rewriting = {"_splash.py", "mesh/device/view.py", "named/around.py", "named/pipeline/onto.py", "program/trace.py"}
    assert walking - rewriting == {"program/reading.py", "named/pipeline/pieces.py"}
