"""`serried completion`: a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from importlib import import_module

SHELLS = ("bash", "zsh", "fish")
_BASH = """\
_serried() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="" words=""
  local word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$word" in -*) ;; *) command="$word"; break ;; esac
  done
  case "$command" in
{cases}
    *) words="{commands}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -o bashdefault -F _serried serried
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    parser.epilog = 'bash: eval "$(serried completion bash)" in ~/.bashrc; fish: serried completion fish | source'


def run(args: argparse.Namespace) -> int:
    options = {name: _options(name) for name in _commands()}
    print(_fish(options) if args.shell == "fish" else _bash(options, zsh=args.shell == "zsh"), end="")
    return 0


def _commands() -> dict[str, str]:
    from serried.cli.main import COMMANDS

    return {name: summary for name, (_, summary) in COMMANDS.items()}


def _options(name: str) -> dict[str, str]:
    """A command's options with their help."""
    from serried.cli.main import COMMANDS

    parser = argparse.ArgumentParser()
    import_module(COMMANDS[name][0]).add_arguments(parser)
    return {
        option: action.help or ""
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def _bash(options: dict[str, dict[str, str]], zsh: bool) -> str:
    cases = "\n".join(f'    {name}) words="{" ".join(sorted(found))}" ;;' for name, found in options.items())
    script = _BASH.format(cases=cases, commands=" ".join(options) + " --help --version")
    return "autoload -U +X bashcompinit && bashcompinit\n" + script if zsh else script


def _fish(options: dict[str, dict[str, str]]) -> str:
    names = " ".join(options)
    lines = [f"set -l commands {names}"]
    for name, summary in _commands().items():
        lines.append(
            f"complete -c serried -f -n 'not __fish_seen_subcommand_from $commands' -a {name} -d {_quoted(summary)}"
        )
    for name, found in options.items():
        for option, text in found.items():
            seen = f"'__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c serried -n {seen} -l {option.removeprefix('--')} -d {_quoted(text)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
