"""`trellis completion`: shell completions, from the commands' own declarations and the fields of a run."""

import argparse
import shlex
from collections.abc import Iterator, Mapping
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
    """

    summary: str
    first: list[str] = field(default_factory=list)
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    valued: set[str] = field(default_factory=set)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `trellis completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that completes")


def execute(args: argparse.Namespace) -> int:
    """`trellis completion`."""
    found = words()
    print(_fish(found) if args.shell == "fish" else _bash(found, zsh=args.shell == "zsh"))
    return 0


def words() -> dict[str, Words]:
    """Every command with the words that may follow it."""
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
        mine = Words(summary=command.summary, options={"--help": ()})
        for action in _declared(parser):
            said = tuple(map(str, action.choices or ()))
            mine.options |= dict.fromkeys(action.option_strings, said)
            mine.valued |= set(action.option_strings if action.nargs != 0 else ())
            mine.first += said if not action.option_strings else ()
        if command.recipe is not None:
            mine.first += RECIPES
            mine.options |= fields
            mine.valued |= set(fields)
        found[name] = mine
    found["recipes"].first += RECIPES
    return found


def _declared(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """What a parser declares, and what those of its actions do."""
    for action in parser._actions:  # argparse has no public way to list declared options
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _declared(one)


def _bash(found: Mapping[str, Words], *, zsh: bool) -> str:
    values: dict[str, tuple[str, ...]] = {}  # by the pattern of a command and an option
    for option in dict.fromkeys(option for mine in found.values() for option in mine.options):
        said = {name: mine.options[option] for name, mine in found.items() if option in mine.options}
        alike = len(set(said.values())) == 1
        values |= {f"{'*' if alike else name}' {option}'": words for name, words in said.items() if words}
    # Of a value that cannot be listed no word is offered, so that the shell offers files.
    other = {name: [option for option in mine.valued if not mine.options[option]] for name, mine in found.items()}
    files = sorted(f"'{name} {option}'" for name, options in other.items() for option in options)
    lines = ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"] if zsh else []
    lines += [
        "_trellis() {",
        '    local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
        '    case "${COMP_WORDS[1]} $before" in',
        *(f"        {pattern}) words={shlex.quote(' '.join(said))} ;;" for pattern, said in values.items()),
        f"        {'|'.join(files)}) words=' ' ;;",
        "    esac",
        '    if [ -z "$words" ] && [ "$COMP_CWORD" -eq 1 ]; then',
        f"        words={shlex.quote(' '.join(found))}",
        '    elif [ -z "$words" ]; then',
        '        case "${COMP_WORDS[1]}" in',
        *(f"            {name}) words={shlex.quote(' '.join((*m.first, *m.options)))} ;;" for name, m in found.items()),
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o default -F _trellis trellis",
    ]
    return "\n".join(lines)


def _fish(found: Mapping[str, Words]) -> str:
    lines = []
    for name, mine in found.items():
        after = f"complete -c trellis -n '__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c trellis -n __fish_use_subcommand -f -a {name} -d {shlex.quote(mine.summary)}")
        if mine.first:
            lines.append(f"{after} -a {shlex.quote(' '.join(mine.first))}")
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
