import io
import os
import pathlib
import pty
import runpy
import subprocess
import sys

import pytest

import trellis
from trellis.commands import line
from trellis.commands.command import called
from trellis.errors import UserError


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = line.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_overview_lists_what_is_there(capsys):
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    for name in line.commands():
        assert f"\n  {name} " in out
    assert run(capsys, "--help") == run(capsys, "help") == (0, out, "")
    assert run(capsys, "help", "watch") == run(capsys, "watch", "--help") != (0, out, "")


@pytest.mark.parametrize("name", line.commands())
def test_every_listed_command_explains_itself(name, capsys):
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "") and out.startswith(f"usage: trellis {name}")


def test_help_on_fields_is_of_the_recipe_and_of_the_options_on_the_line(capsys):
    shown = {
        ("train", "--run-dir", "runs/a"): "starter:",  # an option's value is no recipe
        ("plan", "--on", "v5e:2x2", "tiny"): "tiny:",
        ("import", "folder"): "starter:",
        ("train", "tiny", "--model.family", "gpt_oss"): "tiny and of these options:",
        ("train", "tiny", "--model.family"): "tiny:",  # one that cannot be read changes nothing
    }
    for words, values in shown.items():
        code, out, err = run(capsys, *words, "--help")
        assert (code, err) == (0, "") and f"\nfields of the run, with the values of {values}\n" in out, words
        assert ("--model.window" in out) == ("gpt_oss" in words)


@pytest.mark.slow
def test_overview_loads_nothing_heavy():
    loaded = "sorted({'yaml', 'optax', 'orbax'} & set(sys.modules))"
    code = f"import sys; from trellis.commands import line; line.main(['--help']); print({loaded})"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trian"],
            ["`trellis` needs the name of a command.", "`trian`", "trellis", "did you mean `train`?"],
        ),
        (
            ["recipes", "tinny"],
            [
                "A run must be a recipe, a YAML file or a run's folder.",
                "`tinny`",
                "the first argument",
                "did you mean `tiny`?",
            ],
        ),
        (
            ["recipes", "tiny", "more"],
            [
                "`trellis recipes` has no such argument or option.",
                "more",
                "trellis recipes",
                "leave it out, or see `trellis recipes --help`",
            ],
        ),
        (
            ["doctor", "--device", "2"],
            [
                "`trellis doctor` has no such argument or option.",
                "--device",
                "trellis doctor",
                "did you mean `--devices`?",
            ],
        ),
        (
            ["data", "inspect", "here", "--sample", "2"],
            [
                "`trellis data inspect` has no such argument or option.",
                "--sample",
                "trellis data inspect",
                "did you mean `--samples`?",
            ],
        ),
        (
            ["doctor", "--devices", "two"],
            [
                "The arguments and options of a command must be complete and valid.",
                "argument --devices: invalid int value: 'two'",
                "trellis doctor",
                "see `trellis doctor --help`",
            ],
        ),
        (
            ["doctor", "--devices", "99999999999999999999"],
            [
                "The arguments and options of a command must be complete and valid.",
                "argument --devices: 99999999999999999999 is out of bounds: use 4,096 at most",
                "trellis doctor",
                "see `trellis doctor --help`",
            ],
        ),
        (
            ["generate", "run", "--seed", "4294967296"],
            [
                "The arguments and options of a command must be complete and valid.",
                "argument --seed: 4294967296 is out of bounds: use 2,147,483,647 at most",
                "trellis generate",
                "see `trellis generate --help`",
            ],
        ),
        (
            ["data", "inspect", "store", "--samples", "-1"],
            [
                "The arguments and options of a command must be complete and valid.",
                "argument --samples: -1 is out of bounds: use 0 or more",
                "trellis data inspect",
                "see `trellis data inspect --help`",
            ],
        ),
        (
            ["doctor", "--devices", "0"],
            ["The number of devices must be 1 or more.", "devices=0", "--devices", "use 1 or more, or leave it out"],
        ),
        (
            ["train", "tiny", "--optimizer.lerning_rate", "1"],
            [
                "`optimizer` has no field of this name.",
                "`lerning_rate`",
                "--optimizer.lerning_rate",
                "did you mean `--optimizer.learning_rate`?",
            ],
        ),
        (
            ["train", "tiny", "--out", "there"],
            [
                "`trellis train` has no such argument or option.",
                "--out",
                "trellis train",
                "here it is called --run-dir",
            ],
        ),
        (
            ["train", "tiny", "--lr", "1e-3"],
            ["`Run` has no field of this name.", "`lr`", "--lr", "here it is called --optimizer.learning_rate"],
        ),
        (
            ["train", "tiny", "--steps", "many"],
            ["`steps` must be of type int.", "'many' (str)", "--steps", "write a whole number, as in 8"],
        ),
        (
            ["memory", "tiny", "--hardware", "chips.yaml"],
            [
                "`--hardware` needs a target.",
                "--hardware chips.yaml without --on",
                "--hardware",
                "name one with --on, or leave it out",
            ],
        ),
        (
            ["train", "tiny", "--mesh.model", "-2"],
            ["The size of a mesh axis must be 1 or more, or -1.", "model=-2", "--mesh.model", "use 1 or more"],
        ),
    ],
)
def test_wrong_input_exits_with_2_and_one_message(arguments, message, capsys):
    rule, seen, where, fix = message
    expected = f"trellis: {rule}\n  seen:  {seen}\n  where: {where}\n  fix:   {fix}\n"
    assert run(capsys, *arguments) == (2, "", expected)


def test_recipes(capsys):
    code, out, _ = run(capsys, "recipes")
    assert code == 0 and out.startswith("starter ")
    code, out, _ = run(capsys, "recipes", "tiny")
    assert code == 0 and out.startswith("name: tiny\nmodel:\n  family: llama\n")


def test_options_and_overrides_are_told_apart():
    parser = line._Parser(prog="trellis train")
    parser.add_argument("--run-dir")
    parser.add_argument("--quiet", action="store_true")
    arguments = "tiny --mesh.data -1 --run-dir --odd --data.mask-documents --quiet --steps=3 rest".split()
    mine, overrides, alone = line._split_overrides(parser, arguments)
    assert mine == ["tiny", "--run-dir", "--odd", "--quiet", "rest"]
    assert overrides == {"mesh.data": "-1", "data.mask_documents": "true", "steps": "3"}
    assert alone == ["data.mask_documents"]


@pytest.mark.parametrize("option", ["name", "steps", "data.tokenizer", "data.source.path", "model.rope-scaling"])
def test_an_option_has_a_value_unless_it_is_true_or_false(option, capsys):
    code, out, err = run(capsys, "memory", "tiny", f"--{option}", "--data.mask_documents")
    name = option.replace("-", "_")
    assert (code, out) == (2, "") and f"  seen:  nothing after it\n  where: --{name}\n" in err
    assert "is true or false" not in run(capsys, "memory", "tiny", "--no_such", "--data.mask_documents")[2]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("compare runs/a runs/b --page", "--page"),
        ("export runs/a --to", "--to"),
        ("import folder --to", "--to"),
        ("plan tiny --page", "--page"),
        ("plan tiny --save", "--save"),
        ("plan tiny --costs", "--costs"),
        ("memory tiny --svg", "--svg"),
        ("prove tiny --on v5e:2x2 --programs", "--programs"),
        ("tokenize texts --bytes --out", "--out"),
        ("data convert store --to seqax", "out"),
    ],
)
def test_what_to_write_has_a_name(command, option, capsys):
    code, out, err = run(capsys, *command.split(), "")
    assert (code, out) == (2, "") and "  seen:  argument " in err
    assert f"{option}: it needs a name, and has no letter" in err.replace("OUT", "out")


def test_exit_codes(monkeypatch, capsys):
    class Stopped(UserError):
        exit_code = 3

    def stop(*_):
        raise Stopped("A run stopped.", seen="nan", where="step 3", fix="resume")

    monkeypatch.setattr(line, "_run", stop)
    assert run(capsys, "train")[0] == 3
    monkeypatch.setattr(line, "_run", lambda *_: 143)
    assert run(capsys, "train")[0] == 143

    def fail(*_):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(line, "_run", fail)
    with pytest.raises(ValueError, match="a mistake of ours"):
        line.main(["train"])

    def fill(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")

    monkeypatch.setattr(line, "_run", fill)
    code, _, said = run(capsys, "generate")
    assert code == 2 and "seen:  RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n  where: trellis gen" in said

    def run_out(*_):
        raise MemoryError

    monkeypatch.setattr(line, "_run", run_out)
    code, _, said = run(capsys, "generate")
    assert (
        code == 2
        and "seen:  no memory left on this machine\n  where: trellis generate\n  fix:   use a smaller batch" in said
    )


def test_python_runs_the_package_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trellis", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("trellis", run_name="__main__")
    assert not ended.value.code and capsys.readouterr().out == f"{trellis.__version__}\n"


def test_a_command_that_the_shell_does_not_find_is_told_with_its_path(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv" / "bin" / "trellis"), "train"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert called() == ".venv/bin/trellis"
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert called() == "trellis"


def test_version(capsys):
    assert run(capsys, "--version") == (0, "0.1.0\n", "")


MAIN = "from trellis.commands.line import main; raise SystemExit(main())"


@pytest.mark.slow
def test_a_terminal_that_knows_fewer_characters():
    code = "import sys; sys.stdout.write('first '); from trellis.commands.line import main; main(); print('\\u2588')"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code, "--version"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert found.returncode == 0 and found.stdout.endswith("\n?\n"), found.stderr


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no such device here")
def test_no_room_for_what_is_printed(capsys, monkeypatch):
    """Python holds it until the command has ended, or writes it at once."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", MAIN, "--version"]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    assert found.returncode == 2 and "Traceback" not in found.stderr, found.stderr
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert line.main(["--version"]) == 2
    for said in (found.stderr, capsys.readouterr().err):
        assert "No space left on device" in said and "where: standard output" in said


def test_output_that_nobody_reads_changes_no_exit_code(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        print("held by Python")
        assert line._written(143) == 143
        print("held again")  # and written nowhere
    terminal, writer = pty.openpty()
    os.close(terminal)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        print("held by Python", end="")
        assert line._written(143) == 143
    monkeypatch.setattr(sys, "stdout", None)  # Python's after `>&-`
    assert line._written(3) == 3
