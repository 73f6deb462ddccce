"""`trellis completion`: shell completions, from the commands' own declarations and the fields of a run."""

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from trellis.commands.command import Command

SHELLS = ("bash", "zsh", "fish")


@dataclass(slots=True, kw_only=True)
class Words:
    """The words that may follow a command.

    Attributes:
        summary: one line about the command.
        first: words that its first argument may be.
        options: each option with the words that its value may be; none if these cannot be listed.
        valued: the options that take a value.
        files: whether an argument, or another argument, may be the name of a file.
    """

    summary: str
    first: list[str] = field(default_factory=list)
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    valued: set[str] = field(default_factory=set)
    files: bool = False


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that completes")


def execute(args: argparse.Namespace) -> int:
    """`trellis completion`."""
    found = words()
    print(_fish(found) if args.shell == "fish" else _bash(found, zsh=args.shell == "zsh"))
    return 0


def words() -> dict[str, Words]:
    """Every command, and every action of a command, as in `data inspect`, with the words that may follow it."""
    from trellis.commands.line import commands
    from trellis.recipes import RECIPES
    from trellis.run.config import Run
    from trellis.run.overrides import choices, every_field

    fields: dict[str, tuple[str, ...]] = {}
    for name, declared in every_field(Run):
        option = f"--{name}"  # a field of several variants takes the words of all of them
        fields[option] = tuple(dict.fromkeys((*fields.get(option, ()), *choices(declared.type))))
    found = {}
    for name, command in commands().items():
        parser = argparse.ArgumentParser(add_help=False)
        command.arguments(parser)
        found[name] = mine = _words_of(parser, command.summary)
        for action in parser._actions:  # argparse has no public way to list declared options
            for one, inner in action.choices.items() if isinstance(action, argparse._SubParsersAction) else ():
                found[f"{name} {one}"] = _words_of(inner, command.summary)
        if command.recipe is not None:
            mine.first += RECIPES
            mine.options |= fields
            mine.valued |= set(fields)
    found["recipes"].first += RECIPES
    return found


def _words_of(parser: argparse.ArgumentParser, summary: str) -> Words:
    """The words that a parser declares, without those of its actions."""
    mine = Words(summary=summary, options={"--help": ()})
    for action in parser._actions:
        said = tuple(map(str, action.choices or ()))
        spelled = [option for option in action.option_strings if option.startswith("--")]
        mine.options |= dict.fromkeys(spelled, said)
        mine.valued |= set(spelled if action.nargs != 0 else ())
        mine.first += said if not action.option_strings else ()
        mine.files |= not action.option_strings and not said
    return mine


def _bash(found: Mapping[str, Words], *, zsh: bool) -> str:
    values: dict[str, tuple[str, ...]] = {}  # by the pattern of a command and an option
    for option in dict.fromkeys(option for mine in found.values() for option in mine.options):
        said = {name: mine.options[option] for name, mine in found.items() if option in mine.options}
        alike = len(set(said.values())) == 1
        values |= {f"*' {option}'" if alike else f"'{name} {option}'": words for name, words in said.items() if words}
    # Of a value that cannot be listed no word is offered, so that the shell offers files.
    other = {name: [option for option in mine.valued if not mine.options[option]] for name, mine in found.items()}
    files = sorted(f"'{name} {option}'" for name, options in other.items() for option in options)
    actions = "|".join(f"'{name}'" for name in found if " " in name)
    lines = ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"] if zsh else []
    lines += [
        "_trellis() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" of="${COMP_WORDS[1]}"',
        '    local words="" first="" options="" word',
        '    local action="$of ${COMP_WORDS[2]}"',
        f'    case "$action" in {actions}) [ "$COMP_CWORD" -gt 2 ] && of="$action" ;; esac',
        '    case "$of $before" in',
        *(f"        {pattern}) words={shlex.quote(' '.join(said))} ;;" for pattern, said in values.items()),
        f"        {'|'.join(files)}) words=' ' ;;",
        "    esac",
        '    if [ -z "$words" ] && [ "$COMP_CWORD" -eq 1 ]; then',
        f"        words={shlex.quote(' '.join(name for name in found if ' ' not in name))}",
        '    elif [ -z "$words" ]; then',
        '        case "$of" in',
        *(f"            '{name}') {_said(mine)} ;;" for name, mine in found.items()),
        "        esac",
        '        for word in "${COMP_WORDS[@]:2:COMP_CWORD-2}"; do',
        '            case " $first " in *" $word "*) first="" ;; esac',
        "        done",
        '        words="$first $options"',
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _trellis trellis",
    ]
    return "\n".join(lines)


def _said(mine: Words) -> str:
    """What bash assigns: the words of the first argument, and options, which leave the place of a file to files."""
    first, options = (shlex.quote(" ".join(listed)) for listed in (mine.first, mine.options))
    unless_file = ' case "$cur" in -*) ;; *) options="" ;; esac' if mine.files else ""
    return f"first={first} options={options};{unless_file}".removesuffix(";")


def _fish(found: Mapping[str, Words]) -> str:
    lines = []
    for name, mine in found.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        after, first = f"complete -c trellis -n '{seen}'", " ".join(mine.first)
        if " " not in name:
            lines.append(f"complete -c trellis -n __fish_use_subcommand -f -a {name} -d {shlex.quote(mine.summary)}")
        if first:
            none_yet = f"{seen}; and not __fish_seen_subcommand_from {first}"
            lines.append(f"complete -c trellis -n '{none_yet}' -a {shlex.quote(first)}")
        for option, said in mine.options.items():
            takes = f" -x -a {shlex.quote(' '.join(said))}" if said else " -r" * (option in mine.valued)
            lines.append(f"{after} -l {option.removeprefix('--')}{takes}")
    return "\n".join(lines)


COMMAND = Command(
    name="completion",
    summary="print the completions of a shell",
    description='Prints what makes a shell complete commands, options and fields: eval "$(trellis completion bash)".',
    arguments=arguments,
    execute=execute,
)
