"""The commands of `expert` and `expert-cli`: those of every week first, then the others."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

from expert import __version__
from expert.cli import (
    benchmark,
    board,
    dataset,
    diagnose,
    export,
    improve,
    launch,
    machine,
    manifest,
    new,
    plan,
    pretokenize,
    report,
    sample,
    serve,
    train,
    validate,
    verify,
    watch,
)
from expert.cli.show.display import write_line

_EVERY_WEEK: dict[str, Any] = {
    "new": new.new,
    "dataset": dataset.app,
    "plan": plan.plan,
    "train": train.train,
    "watch": watch.watch,
    "sample": sample.sample,
    "validate": validate.validate,
    "export": export.export,
    "serve": serve.serve,
    "board": board.board,
}
_NOW_AND_THEN: dict[str, Any] = {
    "improve": improve.improve,
    "diagnose": diagnose.diagnose,
    "report": report.report,
    "benchmark": benchmark.benchmark,
    "manifest": manifest.app,
    "machine": machine.machine,
    "pretokenize": pretokenize.pretokenize,
    "find-datasets": dataset.find_datasets,
    "launch": launch.launch,
    "verify": verify.verify,
    "clear-cuda-cache": machine.clear_cuda_cache,
}
_COMMANDS = {**_EVERY_WEEK, **_NOW_AND_THEN}
COMMAND_ORDER = tuple(_COMMANDS)
_COMMAND_OPTIONS: dict[str, dict[str, Any]] = {
    "train": {"cls": train.TrainCommand, "epilog": train.TRAIN_EPILOG},
    "improve": {"epilog": improve.IMPROVE_EPILOG},
    "export": {"epilog": export.EXPORT_EPILOG},
    "serve": {"epilog": serve.SERVE_EPILOG},
    "verify": {"epilog": verify.VERIFY_EPILOG},
    "diagnose": {"epilog": diagnose.DIAGNOSE_EPILOG},
}
_EPILOG = f"More: {', '.join(_NOW_AND_THEN)}. Each has --help."


# Of click, or of typer's copy of it.
_UsageError: Any = typer.BadParameter.__base__


def _suggest_setting(unknown: Any) -> None:
    """If the unknown option is a key of the manifest and the command takes --set, suggest that."""
    from expert.manifest.migrate.aliases import CONFIG_ALIASES
    from expert.manifest.schema.config import TrainingConfig

    options = getattr(getattr(unknown.ctx, "command", None), "params", ())
    key = unknown.option_name.lstrip("-").replace("-", "_")
    key = CONFIG_ALIASES.get(key, key)
    if key in TrainingConfig.model_fields and any("--set" in each.opts for each in options):
        unknown.possibilities = [f"--set {key}=VALUE"]


class _Commands(TyperGroup):
    """Lists commands in the order of use, those of every week with what they do, and suggests --set
    for keys of the manifest."""

    def get_params(self, ctx: Any) -> list[Any]:
        options: list[Any] = super().get_params(ctx)
        for option in options:  # the shell and the docs know them; help is to fit on a screen
            option.hidden = True
        return options

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            for one in (command, *getattr(command, "commands", {}).values()):
                for option in one.get_params(ctx):
                    # Flags take no value, so help shows no `<bool>` next to them.
                    if getattr(option, "is_flag", False) and option.metavar is None:
                        option.metavar = ""
        return command

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=COMMAND_ORDER.index)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for name in _NOW_AND_THEN:  # only here: a shell completes them
            self.commands[name].hidden = True
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if hasattr(error, "possibilities"):  # there is no such option
                _suggest_setting(error)
            raise


app = typer.Typer(
    name="expert",
    cls=_Commands,
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command in _COMMANDS.items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name, **_COMMAND_OPTIONS.get(_name, {}))(_command)


def _show_version(asked: bool) -> None:
    if asked:
        write_line(f"expert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Fine-tune small language models at the full speed of the GPU you have."""


@cache
def command() -> Any:
    """All commands with their options, cached: typer reads all signatures on every call."""
    return typer.main.get_command(app)
