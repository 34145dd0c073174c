"""`ray-on-ecs run`: submit a run as a job of the cluster's head, follow it, and fetch its results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import Field
from difflib import get_close_matches
from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem

from ray_on_ecs import secrets
from ray_on_ecs.cli.cluster_flags import chosen, cluster_flags
from ray_on_ecs.cli.screen import note, print_json
from ray_on_ecs.cluster.clusters import Cluster
from ray_on_ecs.cluster.jobs import (
    DEFAULT_MAX_RESUBMISSIONS,
    MAX_RESUBMISSIONS,
    Submission,
    submission_of_script,
)
from ray_on_ecs.config import OWNER, SUBMITTED, WORKERS, metric_hints, secret_hints, user_name
from ray_on_ecs.errors import Interrupted, TrainingError, UsageError
from ray_on_ecs.flags import environment_variable, flag, flags_of, help_line
from ray_on_ecs.node.jobs import SECRETS
from ray_on_ecs.run.command_line import NEEDLESS, NEEDLESS_FLAGS, SETTINGS, needless_line, with_underscores
from ray_on_ecs.run.program.source import driver_reason, syntax_error
from ray_on_ecs.signals import SIGNALLED

ABOUT = """\
Run SCRIPT on every GPU of the cluster, as torchrun would start it, and follow its output.

The working directory is uploaded, without the files that .gitignore or .rayignore lists. Files that the script writes
there are kept, and restored after a failure.

On the cluster the run continues when this command ends, also after Ctrl-C. The same command with the same --run-name
follows an active run, and resumes an interrupted one. With --local, Ctrl-C stops the run.

Flags of the run come before SCRIPT; the arguments after it go to the script.

\b
Examples:
  ray-on-ecs run --local train.py                     on this machine
  ray-on-ecs run --num-workers 2 train.py --lr 0.1    on two workers
  ray-on-ecs run --num-workers 1:4 train.py           on one to four workers
  ray-on-ecs run -m my.package                        a module
  ray-on-ecs run --input DATA=s3://b/faces train.py   data in $INPUT_DATA
  ray-on-ecs run tune.py                              a Ray program, detected

\b
Exit status:
  0    the run is finished
  1    the training failed; error.json has the reason and the next command
  2    a mistake in the script, its data or the command
  3    workers did not join, or the head can't be reached: ray-on-ecs doctor
  130  Ctrl-C, or 129 after the terminal was closed: see above
"""
# The section of the help whose flags name the cluster, and all sections, by how often their flags are used.
CLUSTER = "Cluster"
SECTIONS = ("Resources", "Run", "Files", "Metrics", "Fault tolerance", "Script", CLUSTER)
# How alike two flags must be for one to be a mistyped other.
CLOSE = 0.8
# The exit status after SIGHUP: the terminal's window is closed.
HANGUP = SIGNALLED + signal.SIGHUP


class Setting(click.Option):
    """A setting of a run as a flag. Its value is left to the run's own checks."""

    def __init__(self, spec: Field) -> None:
        text = help_line(spec, spec.default)
        attributes: dict[str, Any] = {"help": f"{text[0].upper()}{text[1:]}."}
        if spec.type == "bool":
            attributes["is_flag"] = True
        else:
            choices = spec.metadata.get("choices")
            attributes["metavar"] = "|".join(choices) if choices else spec.metadata.get("metavar", "VALUE")
            attributes["multiple"] = bool(spec.metadata.get("repeated"))
            attributes["shell_complete"] = partial(_complete, attributes["metavar"], choices or ())
        attributes["hidden"] = bool(spec.metadata.get("hidden"))
        super().__init__([*flags_of(spec), spec.name], **attributes)
        self.section: str = spec.metadata["section"]


def _complete(
    metavar: str, choices: Sequence[str], ctx: click.Context, param: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the choices that begin like this, or leave it to the shell to complete a file or a folder."""
    kind = {"DIR": "dir", "FILE": "file"}.get(metavar)
    if kind:
        return [CompletionItem(typed, type=kind)]
    return [CompletionItem(choice) for choice in choices if choice.startswith(typed)]


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
        names = dict.fromkeys((name, with_underscores(name)))
        super().__init__(list(names), is_flag=not count, hidden=True, expose_value=False, callback=self._remember)

    def _remember(self, ctx: click.Context, _: click.Parameter, value: object) -> None:
        if value:
            ctx.meta.setdefault(NEEDLESS, []).append(self.opts[0])


class Run(click.Command):
    """The command, whose help has the sections of the settings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an unknown flag before the script may be the script's."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as unknown:
            script = next((argument for argument in args if argument.endswith(".py")), "SCRIPT")
            close = get_close_matches(unknown.option_name, unknown.possibilities or (), n=1, cutoff=CLOSE)
            hint = f"flags of the script follow it, as in ray-on-ecs run {script} {unknown.option_name}"
            if close:
                hint = f"did you mean {close[0]}?"
            raise UsageError(f"{unknown.option_name}: is not a flag of ray-on-ecs run; {hint}") from unknown

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags by section."""
        for section in SECTIONS:
            options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
            of_section = [option for option in options if getattr(option, "section", CLUSTER) == section]
            records = [option.get_help_record(ctx) for option in of_section]
            shown = [record for record in records if record]  # a hidden flag has none
            if shown:
                with formatter.section(section):
                    formatter.write_dl(shown)


@cluster_flags
def _run(
    flags: dict[str, Any],
    detach: bool,
    fetch: str | None,
    as_json: bool,
    max_resubmissions: int,
    command: tuple[str, ...],
    **settings: Any,
) -> int:
    from ray_on_ecs.run.code.files import check_is_project  # it imports pathspec

    if detach and fetch is not None:
        raise UsageError("--fetch: not allowed with --detach; ray-on-ecs fetch copies the results later")
    if as_json and not detach:
        raise UsageError("--json: requires --detach; it prints the name and the job of the submitted run")
    if needless := click.get_current_context().meta.get(NEEDLESS):
        note(needless_line(needless))
    work = _submission({}, settings, command)  # a mistake needs no cluster
    values = secrets.take_from_environment(work.script.secret)
    if work.script.driver and not settings["driver"]:
        note(str(driver_reason(work.script)))
        settings["driver"] = True
    for hint in (*metric_hints(work.script.metric), *secret_hints(work.script.variables)):
        note(hint)
    if "--local" in command[1:] and not flags["local"]:
        note(f"--local after {command[0]} goes to the script; before it, it means this machine")
    cluster = chosen(flags)
    if cluster.ends_with_run and work.script.inputs:
        settings["input"] = _local_inputs(cluster, work)
    if settings.get("storage_path"):
        settings["storage_path"] = cluster.storage_path = cluster.absolute(str(settings["storage_path"]))
        cluster.typed_path = cluster.storage_path if cluster.is_here else ""
    if defaults := cluster.run_flags():
        work = _submission(defaults, settings, command)
    name = work.run["run_name"]
    metadata = {
        **work.run,
        MAX_RESUBMISSIONS: str(max_resubmissions),
        OWNER: user_name(),
        SUBMITTED: f"{time.time():.3f}",
    }
    if values:
        metadata[SECRETS] = json.dumps([cluster.storage(name).uri, *values])
    if cluster.is_here and (fault := syntax_error(work.script)):
        raise UsageError(fault)
    check_is_project(work.script.folder)
    _check_earlier_command(cluster, work)
    with _ray(cluster, work, list(values), stays=detach) as is_local:
        job_id = _submit(cluster, work, metadata, values, quiet=as_json, follows=not detach)
        if not detach:
            return _follow(cluster, work, job_id, fetch)
    if as_json:
        print_json({"run_name": name, "job": job_id, "storage_path": f"{cluster.storage_path}/{name}"})
    shows, stops = cluster.command(f"logs --follow {name}"), cluster.command(f"stop {name}")
    note(f"{shows} shows its log, {stops} stops it{' and Ray' if is_local else ''}")
    return 0


def _local_inputs(cluster: Cluster, work: Submission) -> tuple[str, ...]:
    """Return the inputs as a job that starts in another folder finds them.

    Raises:
        UsageError: A folder is not there, or is empty.
    """
    from ray_on_ecs.run import inputs  # it imports pyarrow

    for name, source in work.script.inputs.items():
        if inputs.is_of_this_machine(source):
            inputs.resolve(name, source, cluster.storage(work.run["run_name"]))
    return tuple(f"{name}={inputs.absolute(source)}" for name, source in work.script.inputs.items())


def _check_earlier_command(cluster: Cluster, work: Submission) -> None:
    """Raise UsageError, before the upload, if the run is finished or had a secret that is missing now."""
    from ray_on_ecs.run.run_secrets import check_repeated
    from ray_on_ecs.tracking.results import check_not_finished

    with contextlib.suppress(OSError):  # the job says what is wrong with the storage
        storage = cluster.storage(work.run["run_name"])
        check_not_finished(storage)
        check_repeated(work.script, storage)


@contextlib.contextmanager
def _ray(cluster: Cluster, work: Submission, secret_names: Sequence[str], *, stays: bool) -> Generator[bool]:
    """Start Ray if it only serves runs; end it with the block. An interrupt of the block ends the run.

    Args:
        cluster: The cluster.
        work: The run.
        secret_names: Its secrets that this command stores.
        stays: True if Ray runs on after the block.

    Yields:
        True if Ray only serves runs.
    """
    name, unlisted = work.run["run_name"], ""
    is_local = cluster.up(work.workers, note)
    ends = is_local
    try:
        yield is_local
        ends = is_local and not stays
    except (KeyboardInterrupt, Interrupted, SystemExit) as end:  # the latter by a signal
        if not is_local:
            raise
        try:
            was_under_way = _stop(cluster, name)
        except KeyboardInterrupt as again:
            if not cluster.down(name):
                ends = False
                stop = cluster.command(f"stop {name}")
                raise Interrupted(
                    f"Ray keeps running for other runs; if run {name} continues, {stop} stops it"
                ) from again
            cluster.secrets_of(cluster.storage(name).uri).delete(secret_names)
            raise Interrupted(f"run {name} was killed; {_again(cluster, work)}") from again
        if not was_under_way:
            unlisted = name  # the interrupt may have lost the answer to its submission
        if not was_under_way or (isinstance(end, SystemExit) and end.code == HANGUP):
            raise
        raise Interrupted(f"run {name} is stopped; {_again(cluster, work)}") from end
    finally:  # a run that could not be followed may be healthy, and is not killed
        if ends and not cluster.down(unlisted):
            note(f"Ray keeps running; {cluster.command('runs')} lists the runs")


def _again(cluster: Cluster, work: Submission) -> str:
    """Return what the same command does with a run that has been stopped."""
    from ray_on_ecs.run.files.newest import has_stored, newest_stored, nothing_stored_line

    name = work.run["run_name"]
    again = f"the same command with --run-name {name}"
    with contextlib.suppress(OSError, UsageError, ValueError):
        storage = cluster.storage(name)
        if newest := newest_stored(work.script, storage):
            file, stored_at = newest
            return f"{again} resumes it from {file} of {stored_at:%Y-%m-%d %H:%M:%S} UTC"
        if not has_stored(work.script, storage):
            return nothing_stored_line(name)
    return f"{again} resumes it"


def _follow(cluster: Cluster, work: Submission, job_id: str, fetch: str | None) -> int:
    """Show the log to its end, and fetch the results; return the run's exit status."""
    from ray_on_ecs.cli.follow import Follower

    name = work.run["run_name"]
    status = Follower(cluster, work.run).follow(job_id)
    if fetch is not None:
        from ray_on_ecs.cli.fetch import fetch_run

        try:
            fetch_run(cluster, name, fetch)
        except TrainingError as cause:  # one that could not begin has no folder, and says itself why
            if not status:
                raise
            note(str(cause))
    elif status in (0, TrainingError.exit_status):  # otherwise it has not begun
        copies = "" if cluster.is_here else f", {cluster.command(f'fetch {name}')} copies it to this machine"
        note(f"{cluster.command(f'open {name}')} shows its report{copies}")
    return status


def _stop(cluster: Cluster, name: str) -> bool:
    """Stop the run, and return whether it was under way."""
    from ray_on_ecs.cli.logs import Elsewhere
    from ray_on_ecs.cli.stop import stop_run

    note(f"stopping run {name}; Ctrl-C kills it")
    with cluster.connect() as head, contextlib.suppress(Elsewhere):
        return stop_run(cluster, head, name)
    return False


def _submission(defaults: dict[str, Any], settings: dict[str, Any], command: Sequence[str]) -> Submission:
    """Return the job to submit.

    Args:
        defaults: The cluster's settings, which `settings` override.
        settings: The typed settings by name.
        command: The script and its arguments.

    Raises:
        UsageError: A setting or a file can't be used.
    """
    defaults = dict(defaults)
    if any(settings.get(name) for name in (*WORKERS, "driver")) or os.environ.get(environment_variable("num_workers")):
        defaults.pop("num_workers", None)
    typed = {**defaults, **{name: value for name, value in settings.items() if value not in (None, False, ())}}
    if not command:
        raise UsageError("SCRIPT: is missing; give the script to run, as in ray-on-ecs run train.py")
    return submission_of_script([*_flags(typed), *command])


def _flags(typed: dict[str, Any]) -> Iterator[str]:
    specs = {spec.name: spec for spec in SETTINGS}
    for name, value in typed.items():
        for item in value if isinstance(value, tuple) else (value,):
            yield flags_of(specs[name])[-1]
            if item is not True:
                yield str(item)


def _submit(
    cluster: Cluster,
    work: Submission,
    metadata: dict[str, str],
    values: dict[str, str],
    *,
    quiet: bool,
    follows: bool,
) -> str:
    from ray_on_ecs.cluster.jobs import find_or_submit, is_under_way

    with cluster.connect_when_up(note) as head, contextlib.ExitStack() as opened:
        if not is_under_way(head, work):
            note(f"uploading {work.script.folder}")
            work = work.with_code(cluster.code_storage(work.run["run_name"]), note, is_here=cluster.is_here)
            if values:
                cluster.secrets_of(cluster.storage(work.run["run_name"]).uri).put(values)
        if quiet:
            opened.enter_context(contextlib.redirect_stdout(sys.stderr))
        return find_or_submit(head, work, metadata, follows=follows)


_own = [
    Own("Run", "--detach", is_flag=True, help="Submit the run, and end without following it."),
    Own("Run", "--fetch", metavar="DIR", help="Copy the results to DIR at the end, like the command fetch."),
    Own("Run", "--json", "as_json", is_flag=True, help="With --detach, print the name and the job of the run as JSON."),
    Own(
        "Fault tolerance",
        flag(MAX_RESUBMISSIONS),
        type=click.IntRange(min=0),
        envvar=environment_variable(MAX_RESUBMISSIONS),
        default=DEFAULT_MAX_RESUBMISSIONS,
        metavar="N",
        help="Maximum number of times in a row that the head submits the run again after its driver was lost "
        f"(default: {DEFAULT_MAX_RESUBMISSIONS}).",
    ),
    *(Needless(name, count) for name, count in NEEDLESS_FLAGS.items()),
    click.Argument(
        ["command"],
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="SCRIPT [ARGUMENTS]",
        shell_complete=partial(_complete, "FILE", ()),
    ),
]
command = Run(
    "run",
    callback=_run,
    help=ABOUT,
    params=[*_own, *reversed(getattr(_run, "__click_params__", [])), *map(Setting, SETTINGS)],
    context_settings={"allow_interspersed_args": False},
)
