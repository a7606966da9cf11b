"""Options that several subcommands have: the engine's settings, and where the ledger goes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_engine.config import EngineConfig
from compiled_engine.errors import ConfigError

if TYPE_CHECKING:
    from compiled_engine.compile.ledger import Ledger

# Settings of EngineConfig that have no option of their own: --model is described apart, --seed is the sampling seed.
_NO_OPTION = ("model", "seed")
# Other names of options.
_ALIASES = {"device": ("--backend",)}
_METAVARS = {"graphs": "DIR", "on_compile": "ACTION", "record": "FILE"}


def add_engine_options(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Add --model and an option for each setting of ``EngineConfig``; options that are not given leave no attribute.

    leave_out: settings that make no difference to this command.
    """
    group = parser.add_argument_group("engine")
    for item in dataclasses.fields(EngineConfig):
        if item.name not in leave_out and (item.name not in _NO_OPTION or item.name == "model"):
            _add_field(group, item)
    add_debug_option(group)


def add_debug_option(parser: argparse._ActionsContainer) -> None:
    """Add --debug, which ``main`` reads."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given on the command line, by their names in ``EngineConfig``."""
    names = {item.name for item in dataclasses.fields(EngineConfig)} - (set(_NO_OPTION) - {"model"})
    return {name: value for name, value in vars(arguments).items() if name in names}


def add_positional_model(
    parser: argparse.ArgumentParser, metavar: str = "MODEL", text: str = "same as --model"
) -> None:
    """Add the argument MODEL, which ``settings_with_model`` reads."""
    parser.add_argument("positional_model", nargs="?", metavar=metavar, help=text)


def settings_with_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """``engine_settings``, with the model from MODEL or --model. Raises ``ConfigError`` if both are given."""
    settings = engine_settings(arguments)
    if arguments.positional_model is not None:
        if "model" in settings:
            raise ConfigError("the model is named twice, as MODEL and as --model: name it once")
        settings["model"] = arguments.positional_model
    return settings


def config_of_stored_graphs(arguments: argparse.Namespace) -> EngineConfig:
    """The settings, for a command about graphs on disk.

    Raises ``ConfigError`` for settings that cannot work, and for a device whose graphs are never kept.
    """
    config = EngineConfig(**settings_with_model(arguments))
    if config.device_type == "tpu":
        raise ConfigError(
            "device is 'tpu', and its graphs are never stored, because torch_xla cannot load compiled graphs again: "
            "`compiled-engine generate --backend tpu` compiles them at its start; choose cpu or cuda here"
        )
    return config


def add_ledger_options(parser: argparse._ActionsContainer) -> None:
    """Add --ledger and --ledger-json."""
    parser.add_argument("--ledger", action="store_true", help="show on stderr where the time of the start went")
    parser.add_argument("--ledger-json", metavar="FILE", help="write the same to FILE as JSON")


def check_ledger_file(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` if --ledger-json cannot be written, before minutes are spent."""
    if arguments.ledger_json is not None:
        path = Path(arguments.ledger_json)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ConfigError(f"--ledger-json {path}: give a file in a folder that exists")


def wants_ledger(arguments: argparse.Namespace) -> bool:
    """Whether ``show_ledger`` would show anything."""
    return arguments.ledger or arguments.ledger_json is not None


def show_ledger(arguments: argparse.Namespace, ledger: Ledger) -> None:
    """Do what --ledger and --ledger-json ask for. Raises ``ConfigError`` if the file cannot be written."""
    if arguments.ledger:
        from rich.console import Console

        Console(file=sys.stderr).print(ledger.table())
    if arguments.ledger_json is not None:
        try:
            Path(arguments.ledger_json).write_text(json.dumps(ledger.to_json(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--ledger-json {arguments.ledger_json}: {error.strerror or error}") from error


def _add_field(group: argparse._ArgumentGroup, item: dataclasses.Field[Any]) -> None:
    kinds = str(item.type).replace(" ", "").split("|")
    option: dict[str, Any] = {}
    if "bool" in kinds:
        option["action"] = argparse.BooleanOptionalAction if item.default else "store_true"
    elif "tuple[int,...]" in kinds:
        option["type"] = _numbers
        option["metavar"] = "N,N,..."
    elif "str" not in kinds and ("int" in kinds or "float" in kinds):
        option["type"] = int if "int" in kinds else float
        option["metavar"] = "N"
    else:
        option["metavar"] = _METAVARS.get(item.name, item.name.rsplit("_", 1)[-1].upper())
    default = "" if item.default is None or item.default is False else f" (default {item.default})"
    group.add_argument(
        "--" + item.name.removeprefix("enable_").replace("_", "-"),
        *_ALIASES.get(item.name, ()),
        dest=item.name,
        default=argparse.SUPPRESS,
        help=(item.metadata["doc"] + default).replace("%", "%%"),
        **option,
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,2,4") from None
