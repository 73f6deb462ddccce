"""A shell completes commands, their options, the fields of a run and the values that can be listed."""

import shlex
import shutil
import subprocess

import pytest

from tests.train.small import trellis
from trellis.commands.completion import SHELLS
from trellis.commands.line import commands
from trellis.recipes import RECIPES


@pytest.fixture
def complete(capsys):
    script = trellis(capsys, "completion", "bash")[1]

    def completed(*words: str) -> list[str]:
        """What bash offers for the last of the words."""
        typed = shlex.join(["trellis", *words])
        ask = f'COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _trellis; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
        return done.stdout.split()

    return completed


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to complete in")
def test_what_bash_completes(complete):
    assert complete("tr") == ["train"]
    assert set(complete("")) == set(commands())
    assert complete("train", "star") == ["starter"]
    assert complete("train", "tiny", "--unt") == ["--until"]
    assert complete("train", "tiny", "--optimizer.learning") == ["--optimizer.learning_rate"]
    assert complete("plan", "--data.source.val") == ["--data.source.validation"]
    assert complete("train", "tiny", "--remat.policy", "o") == ["offload"]
    assert complete("train", "tiny", "--data.mask_documents", "") == ["true", "false"]
    assert set(complete("train", "--optimizer", "")) == {"adamw", "lion", "muon", "adafactor"}
    assert complete("train", "--logging.trackers", "") == ["tensorboard", "wandb"]
    assert complete("plan", "tiny", "--on", "") == complete("train", "--run-dir", "") == [], "the shell offers files"
    assert complete("train", "--steps", "") == [] and "tiny" in complete("plan", "--compile", "")
    assert complete("data", "ins") == ["inspect"]
    assert complete("data", "convert", "--sp") == ["--split"]
    assert complete("data", "convert", "--to", "nano") == ["nanogpt"]
    assert "nanogpt" not in complete("export", "--to", ""), "an option of the same name"
    assert set(RECIPES) <= set(complete("recipes", ""))
    assert complete("report", "--optimizer") == [], "a command that is not about a recipe takes no fields"


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to complete in")
def test_words_of_the_first_argument_are_offered_once(complete):
    assert set(complete("data", "")) == {"inspect", "verify", "convert", "--help"}
    assert complete("data", "inspect", "") == complete("data", "inspect", "i") == [], "the shell offers files"
    assert set(complete("data", "inspect", "-")) == {"--help", "--samples", "--json"}
    assert complete("data", "verify", "--to", "") == []
    assert complete("recipes", "tiny", "t") == complete("train", "tiny", "--until", "3", "ti") == []
    assert complete("train", "--until", "3", "ti") == ["tiny"] and "--steps" in complete("train", "tiny", "")
    assert complete("completion", "bash", "") == ["--help"]
    assert complete("compare", "runs/a", "") == [] and complete("compare", "runs/a", "--p") == ["--page"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_its_words(shell, capsys):
    code, out, err = trellis(capsys, "completion", shell)
    assert (code, err) == (0, "")
    assert "mesh.model" in out and "starter" in out and "fsdp_tensor" in out
    assert ("bashcompinit" in out) == (shell == "zsh")
    assert ("complete -c trellis" in out) == (shell == "fish")
    assert out.count("complete -o default -F _trellis trellis") == (shell != "fish")


def test_another_shell_is_refused(capsys):
    code, _, err = trellis(capsys, "completion", "ksh")
    assert code == 2 and "invalid choice: 'ksh'" in err
