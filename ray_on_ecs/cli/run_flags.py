"""Flags of `ray-on-ecs run`: settings of the run by section, torchrun's, and the settings that they give."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, replace
from difflib import get_close_matches
from typing import Any

import click

from ray_on_ecs.cli.screen import note
from ray_on_ecs.cli.script_name import ScriptName
from ray_on_ecs.config import SETTINGS, RunConfig, defaults_in
from ray_on_ecs.contract import DEFAULT_POOL, field_of, key_of
from ray_on_ecs.errors import UsageError
from ray_on_ecs.flags import flags_of, has_value, parse
from ray_on_ecs.rules import check_range, worker_range
from ray_on_ecs.run import inline_metadata
from ray_on_ecs.run.program.launchers import leave_out
from ray_on_ecs.run.program.source import driver_reason, with_driver

# The section of the help whose flags name the cluster, and all sections, by how often their flags are used.
CLUSTER = "Cluster"
SECTIONS = ("Resources", "Run", "Files", "Metrics", "Fault tolerance", "Script", CLUSTER)
# Flags of torchrun that are accepted, by the number of their values: the run decides what they say.
NEEDLESS_FLAGS = {
    **dict.fromkeys(("--standalone", "--use-env"), 0),
    **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"), 1),
    **dict.fromkeys(("--master-addr", "--master-port", "--node-rank", "--local-addr", "--role"), 1),
    **dict.fromkeys(("--monitor-interval", "--start-method", "--shutdown-timeout", "--signals-to-handle"), 1),
    **dict.fromkeys(("--log-dir", "--log-line-prefix-template", "--local-ranks-filter", "--logs-specs"), 1),
    **dict.fromkeys(("--duplicate-stdout-filters", "--duplicate-stderr-filters", "--event-log-handler"), 1),
    **dict.fromkeys(("--redirects", "-r", "--tee", "-t", "--numa-binding"), 1),
}
# Flags of this command that scripts seldom have.
SELDOM = ("--local", "--compose", "--detach", "--then-stop", "--run-name", "--max-resubmissions")
# Flags that one may expect here, by the key of a pool that decides it.
OF_POOLS = {
    **dict.fromkeys(("--spot", "--use-spot", "--use-spot-instances", "--spot-policy"), "spot"),
    "--on-demand": "on_demand",
    **dict.fromkeys(("--instance-type", "--instance-types"), "instance_types"),
    **dict.fromkeys(("--zone", "--zones"), "zones"),
    "--disk-size": "root_volume_gib",
}
NEEDLESS = "needless"
# torchrun's words for "as many as there are devices".
EVERY_DEVICE = ("auto", "gpu", "cpu")
# How alike two flags must be for one to be a mistyped other.
CLOSE = 0.8


class Setting(click.Option):
    """A setting of a run as a flag."""

    def __init__(self, spec: Field) -> None:
        value = f"{spec.default:g}" if isinstance(spec.default, float) else spec.default
        shown = "" if spec.default in (None, (), False) else f" (default: {value})"
        text = spec.metadata["description"]
        choices = spec.metadata.get("choices")
        metavar = "|".join(choices) if choices else spec.metadata.get("metavar")
        kind: click.ParamType | None = click.Choice(choices) if choices else None
        if metavar in ("DIR", "FILE"):
            kind = click.Path(file_okay=metavar == "FILE")
        super().__init__(
            [*flags_of(spec), spec.name],
            help=f"{text[0].upper()}{text[1:]}{shown}.",
            is_flag=spec.type == "bool" or None,  # False would mean an optional value
            metavar=metavar,
            type=kind,  # for the shell's completion
            multiple=bool(spec.metadata.get("repeated")),
        )
        self.section: str = spec.metadata["section"]
        self._spec = spec

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the setting's value of a typed text; UsageError if it is not a number."""
        if isinstance(value, str) and has_value(self._spec):
            return parse(self._spec, value)
        return tuple(value or ()) if self.multiple else value


class Own(click.Option):
    """A flag of this command, in a section of the help."""

    def __init__(self, section: str, *names: str, **attributes: Any) -> None:
        super().__init__(list(names), **attributes)
        self.section = section

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Return nothing: a range would stand behind the sentence, as in `[x>=0]`."""
        return {}


class Needless(click.Option):
    """Flag of torchrun that is accepted but not needed, with a hint."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__([name], is_flag=not count, hidden=True, expose_value=False, callback=self._remember)

    def _remember(self, ctx: click.Context, _: click.Parameter, value: object) -> None:
        if value:
            ctx.meta.setdefault(NEEDLESS, []).append(self.opts[0])


class RunCommand(click.Command):
    """The command, whose help has the sections of the settings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an unknown flag before the script may be the script's."""
        try:
            options, _, _ = self.make_parser(ctx).parse_args(list(args))
            command = options.get("command")
            if isinstance(command, tuple) and not (options.get("no_python") or options.get("module")):
                words = leave_out(command)
                if words != list(command):
                    args = [word for word in args[: len(args) - len(command)] if word != "--"] + words
            rest = super().parse_args(ctx, list(args))
            ctx.params["typed"] = args[: len(args) - len(ctx.params["command"])]
            return rest
        except click.NoSuchOption as unknown:
            script = next((argument for argument in args if argument.endswith(".py")), "SCRIPT")
            close = get_close_matches(unknown.option_name, unknown.possibilities or (), n=1, cutoff=CLOSE)
            hint = f"flags of the script follow it, as in ray-on-ecs run {script} {unknown.option_name}"
            if key := OF_POOLS.get(unknown.option_name):
                keys = [key_of(field_of(pool, key)) for pool in (DEFAULT_POOL, "NAME")]
                hint = f"each pool has its own, by the keys {' and '.join(keys)}, and --pool chooses the pool; {hint}"
            elif close:
                hint = f"did you mean {close[0]}?"
            raise UsageError(f"{unknown.option_name}: is not a flag of ray-on-ecs run; {hint}") from unknown

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags by section."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        for section in SECTIONS:
            of_section = [option for option in options if getattr(option, "section", CLUSTER) == section]
            records = [option.get_help_record(ctx) for option in of_section]
            if shown := [record for record in records if record]:  # a hidden flag has none
                with formatter.section(section):
                    formatter.write_dl(shown)


def settings_of(typed: Mapping[str, Any]) -> tuple[RunConfig, frozenset[str]]:
    """Return the settings of a run, with a name, and the names of those that the user gave.

    `typed` has the values of this command's parameters, by name, and under `typed` the words before SCRIPT. UsageError
    if one breaks its rule, a file is missing, or a setting does not apply to Ray programs.
    """
    if not typed["command"]:
        raise UsageError("SCRIPT: is missing; give the script to run, as in ray-on-ecs run train.py")
    values = given_settings(typed)
    given = defaults_in(os.environ, values)
    given.pop("storage_path", None)  # the cluster knows it
    given |= values
    config = RunConfig(**given, command=typed["command"])
    config.check_files()
    ScriptName(config, typed["typed"]).check()
    if reason := driver_reason(config):
        note(reason)
        config = with_driver(config, reason)
    script = config.folder / config.command[0]
    is_file = not (config.module or config.no_python) and script.suffix == ".py"
    if is_file and config.requirements is None and inline_metadata.dependencies(script):
        note(f"the packages of {script.name} are those of its inline metadata; --requirements FILE takes precedence")
        config = replace(config, requirements=config.command[0])
    return replace(config.named(), requirements=config.requirements_in_folder), frozenset(given)


def flags_after_script(config: RunConfig) -> list[str]:
    """Return the flags of this command among the script's arguments that the script's text does not have.

    Of a module or a program, whose text is not read, only those that scripts seldom have.
    """
    known, text = {*SELDOM}, ""
    if not (config.module or config.no_python):
        known |= {name for spec in SETTINGS for name in flags_of(spec) if name.startswith("--")}
        with suppress(OSError):
            text = (config.folder / config.command[0]).read_text(errors="replace")
    words = {*re.findall(r"(?:--)?[\w-]+", text)}
    typed = [word.partition("=")[0] for word in config.command[1:]]
    return [name for name in typed if name in known and not {name, name[2:].replace("-", "_")} & words]


def given_settings(typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were typed, of all values of this command's parameters by name."""
    values = {spec.name: typed[spec.name] for spec in SETTINGS}
    nodes, per_node = typed["nnodes"], typed["nproc_per_node"]
    if nodes or per_node:
        given = values.pop("num_workers")
        check_range("--nnodes", nodes)
        if per_node not in EVERY_DEVICE:
            if not re.fullmatch(r"[1-9]\d*", per_node or "1"):
                rule = f"it must be a number from 1, or one of {', '.join(EVERY_DEVICE)}"
                raise UsageError(f"--nproc-per-node: {per_node!r} is not allowed; {rule}")
            minimum, maximum = (number * int(per_node or 1) for number in worker_range(nodes or 1))
            values["num_workers"] = minimum if minimum == maximum else f"{minimum}:{maximum}"
        if given not in (None, values.setdefault("num_workers", None)):
            raise UsageError("--num-workers: can't be given with --nnodes or --nproc-per-node; use one or the other")
    return {name: value for name, value in values.items() if value is not False and value not in (None, ())}
