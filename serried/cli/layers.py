"""Options in layers: the command line first, then SERRIED_* variables, then a YAML file, then the defaults."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from serried.errors import InputError

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}
_CONFIG = "config"


def fill(parser: argparse.ArgumentParser, args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Give the options that the command line has not given, and whose default is None, a value from below.

    environment: by option (max_model_len). The file is named by --config, or by the variable of that name; its keys
    are the options' names. A key or a value that makes no sense -> InputError that names it and where it stands.
    """
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    path = getattr(args, _CONFIG) or environment.get(_CONFIG)
    layers = [({key: value for key, value in environment.items() if key != _CONFIG}, "SERRIED_{}", True)]
    if path is not None:
        layers.append((_read(path), f"{path}: {{}}", False))
    for values, place, in_environment in layers:
        for key, value in values.items():
            name = key.replace("-", "_")
            shown = place.format(name.upper() if in_environment else key)
            if name not in actions or name == _CONFIG:
                near = get_close_matches(name, actions, n=1)
                hint = f"; did you mean {near[0].upper() if in_environment else near[0]}?" if near else ""
                raise InputError(f"{shown}: no such option{hint}")
            if getattr(args, name) is None and value is not None:
                setattr(args, name, _value(actions[name], value, shown))


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--config {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"--config {path}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InputError(f"--config {path}: expected a mapping of options, such as `port: 8000`")
    return content


def _value(action: argparse.Action, given: Any, place: str) -> Any:
    """A value as the command line would have given it."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return _switch(given, place)
    if isinstance(action, argparse._AppendAction):
        return [_parsed(action, each, place) for each in (given if isinstance(given, list) else [given])]
    if isinstance(given, list) and all(isinstance(each, int) for each in given):
        given = ",".join(map(str, given))
    return _parsed(action, given, place)


def _switch(given: Any, place: str) -> bool:
    text = str(given).lower()
    if text not in _TRUE | _FALSE:
        raise InputError(f"{place}: {given!r}: expected true or false")
    return text in _TRUE


def _parsed(action: argparse.Action, given: Any, place: str) -> Any:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise InputError(f"{place}: {given!r}: expected a text or a number")
    if not callable(action.type):
        return str(given)
    try:
        return action.type(str(given))
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
