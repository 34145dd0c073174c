"""`ray-on-ecs run`: request a run of the cluster's head, follow it, and fetch its results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ray_on_ecs import secrets
from ray_on_ecs.cli.cluster_flags import chosen, cluster_flags
from ray_on_ecs.cli.follow import Follower, way_on
from ray_on_ecs.cli.logs import Elsewhere, jobs_of
from ray_on_ecs.cli.run_flags import (
    NEEDLESS,
    NEEDLESS_FLAGS,
    Needless,
    Own,
    RunCommand,
    Setting,
    flags_after_script,
    settings_of,
)
from ray_on_ecs.cli.screen import note, notes, out, print_json
from ray_on_ecs.cli.script_name import ScriptName
from ray_on_ecs.cli.stop import stop_run
from ray_on_ecs.cli.target import check_folder, check_target
from ray_on_ecs.cluster.clusters import Cluster, HeadCluster
from ray_on_ecs.cluster.jobs import DEFAULT_MAX_RESUBMISSIONS, find_or_submit
from ray_on_ecs.config import CLUSTER_FLAG, OWNER, SETTINGS, SUBMITTED, RunConfig, user_name
from ray_on_ecs.errors import EfaError, Interrupted, LimitReached, StorageError, TrainingError, UsageError, one_line
from ray_on_ecs.flags import environment_variable, flag
from ray_on_ecs.jobs.record import MAX_RESUBMISSIONS, RUN, SECRETS, THEN_STOP
from ray_on_ecs.rules import secret_hints
from ray_on_ecs.run.inline_metadata import check_python
from ray_on_ecs.run.local_gpus import count_gpus
from ray_on_ecs.run.program.source import syntax_error
from ray_on_ecs.run.supervisor import GRACE_SECONDS
from ray_on_ecs.signals import SIGNALLED
from ray_on_ecs.storage.bucket import NoBucket
from ray_on_ecs.storage.run_storage import RunStorage

ABOUT = """\
Run SCRIPT once per GPU, as torchrun would start it, and follow its output.

The working directory is uploaded, without the files that .gitignore or .rayignore lists. Files that the script writes
there are kept, and restored after a failure.

On the cluster the run continues when this command ends, also after Ctrl-C. The same command with the same --run-name
follows an active run, and resumes an interrupted one. With --local, Ctrl-C stops the run that this command has started.

Flags of the run come before SCRIPT; the arguments after it go to the script.

\b
Examples:
  ray-on-ecs run --local train.py                     on this machine
  ray-on-ecs run --num-workers 2 train.py --lr 0.1    on two workers
  ray-on-ecs run --num-workers 1:4 train.py           on one to four workers
  ray-on-ecs run --gpu H100,A100 train.py             the first that EC2 has
  ray-on-ecs run -m my.package                        a module
  ray-on-ecs run --input DATA=s3://b/faces train.py   data in $INPUT_DATA
  ray-on-ecs run tune.py                              a Ray program, detected

\b
Exit status:
  0    the run is finished
  1    the training failed; error.json has the reason and the next command
  2    a mistake in the script, its data or the command
  3    workers did not join, or the head can't be reached: ray-on-ecs doctor
  4    --max-hours or --max-usd is reached; a higher one continues the run
  5    NCCL does not use EFA, which --require-efa wants; its files are kept
  130  Ctrl-C, or 129 after the terminal was closed: see above
"""
# Settings that a run may need again: the script may need its packages.
KEPT = ("requirements", "env", "input", "metric", "gpu", "pool", THEN_STOP)
# Exit statuses of a run that has a folder.
ADMITTED = (0, *(error.exit_status for error in (TrainingError, LimitReached, EfaError)))
# The exit status after SIGHUP: the terminal's window is closed.
HANGUP = SIGNALLED + signal.SIGHUP


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
        note(f"{', '.join(needless)}: not needed; the run has its own rendezvous and log")
    config, given = settings_of({**settings, "command": command})  # a mistake needs no cluster
    values = secrets.take_from_environment(config.secret)
    for hint in secret_hints(config.variables):
        note(hint)
    for name in flags_after_script(config):
        note(f"{name} after {command[0]} goes to the script; before it, it is a flag of this command")
    cluster = chosen(flags)
    config = cluster.check_settings(config)
    if config.then_stop and not cluster.starts_workers:
        raise UsageError(f"--then-stop: {cluster.name} has no instances to stop; leave it out")
    if config.max_usd and not cluster.starts_workers:
        raise UsageError(f"--max-usd: {cluster.name} has no prices; limit the run by --max-hours, and leave it out")
    config = _on_cluster(cluster, config, given)
    name = str(config.run_name)
    if cluster.is_here and (fault := syntax_error(config)):
        raise UsageError(fault)
    if cluster.is_here and (config.requirements or "").endswith(".py"):
        check_python(config.folder / str(config.requirements))
    is_one = config.num_workers is None and cluster.is_here and count_gpus() == 1
    if not is_one and (hint := ScriptName(config, settings["typed"]).check_launcher()):
        note(hint)
    check_is_project(config.folder)
    from ray_on_ecs.run import document
    from ray_on_ecs.run.code import archive

    storage = cluster.storage(name)
    if cluster.is_here and storage.is_local:
        check_folder(Path(storage.path()), "--storage-path")
    if fetch is not None:
        check_target(storage, Path(fetch) / name, "--fetch")
    of_document = cluster.document_storage(storage)
    rm = cluster.command(f"rm {name}") if cluster.reads_path else ""
    earlier = _earlier_command(storage, of_document, config, rm)
    resubmissions = 0 if cluster.ends_with_command else max_resubmissions  # only a head does that
    metadata = {MAX_RESUBMISSIONS: str(resubmissions), OWNER: user_name(), SUBMITTED: f"{time.time():.3f}"}
    if cluster.typed:
        metadata[CLUSTER_FLAG] = cluster.typed.strip()
    if config.then_stop:
        metadata[THEN_STOP] = "true"
    if values:
        metadata[SECRETS] = json.dumps([storage.uri, *values])
    if fetch is not None:  # before the run: this package may be updated meanwhile
        from ray_on_ecs.cli.fetch import copy_run
    status, started = 0, list[bool]()  # True in it if this command has started the run
    followers: list[Follower] = []
    with _interruptible(cluster, name, started, followers):
        run = dict(zip(RUN, (name, cluster.storage_path), strict=True))  # under another path it is another run

        def upload() -> Callable[[], dict[str, str]]:
            note(f"{'copying' if cluster.is_here else 'uploading'} {config.folder}")
            code = archive.store(config, cluster.code_storage(storage), note, is_here=cluster.is_here)

            def write() -> dict[str, str]:
                digest = document.write(of_document, config, given, code, earlier)
                if values:  # after the document, which has their names for `rm`
                    cluster.secrets_of(storage.uri).put(values)
                started.append(True)
                return {**metadata, document.DIGEST: digest}

            return write

        with cluster.ready_for(config, note), contextlib.ExitStack() as opened:
            if as_json:
                opened.enter_context(contextlib.redirect_stdout(sys.stderr))
            jobs = cluster.jobs(note)
            job_id = find_or_submit(jobs, run, of_document.uri, upload, follows=not detach)
        if not detach:
            if cluster.ends_with_command and not started:
                note(f"Ctrl-C ends this command alone; {cluster.command(f'stop {name}')} stops the run")
            followers.append(Follower(cluster, jobs, run))
            status = followers[0].follow(job_id)
    # From here on another command may have started the run again.
    if not detach:
        if fetch is None:
            if status in ADMITTED:
                _say_where(cluster, name)
            return status
        try:
            note(str(copy_run(cluster, name, Path(fetch))))
        except TrainingError as cause:  # of a run that could not begin, which says itself why
            if not status:
                raise
            note(str(cause))
        return status
    if as_json:
        print_json({"run_name": name, "job": job_id, "storage_path": f"{cluster.storage_path}/{name}"})
    shows, stops = cluster.command(f"logs --follow {name}"), cluster.command(f"stop {name}")
    note(f"{shows} shows its log, {stops} stops it")
    return 0


def _on_cluster(cluster: Cluster, config: RunConfig, given: Collection[str]) -> RunConfig:
    """Return the settings with the cluster's defaults and with its paths; UsageError for an input that is not there."""
    changed: dict[str, Any] = {}
    if "storage_path" in given:
        path, own = cluster.absolute(config.storage_path), cluster.storage_path
        changed["storage_path"] = cluster.storage_path = path
        if isinstance(cluster, HeadCluster):
            cluster.typed_path = path
        else:
            cluster.reads_path = path.rstrip("/") == own.rstrip("/")
    if cluster.is_here and config.inputs:
        from ray_on_ecs.run import inputs

        for name, source in config.inputs.items():
            if inputs.is_of_this_machine(source):
                inputs.resolve(name, source, cluster.storage(str(config.run_name)))
        changed["input"] = tuple(f"{name}={inputs.absolute(source)}" for name, source in config.inputs.items())
    return replace(config, **changed)


def _earlier_command(storage: RunStorage, of_document: RunStorage, config: RunConfig, rm: str) -> dict[str, Any]:
    """Return the document of the run's earlier command, or an empty one; print the settings that this command lacks.

    `rm` is the command that deletes the run; empty if there is none.

    UsageError if the run is finished, had a secret that is missing now, or is in a folder that can't be read;
    StorageError if a bucket can't.
    """
    from ray_on_ecs.run import document
    from ray_on_ecs.run.run_secrets import check_repeated
    from ray_on_ecs.tracking.results import check_not_finished

    try:
        check_not_finished(storage, rm)
        earlier = document.read_earlier(of_document)
    except NoBucket as cause:
        raise UsageError(one_line(cause)) from cause
    except OSError as cause:
        if isinstance(error := getattr(cause, "error", None), TrainingError):
            raise error from cause
        if storage.is_local:
            raise UsageError(
                f"--storage-path: {storage.uri} can't be read ({one_line(cause)}); give another folder"
            ) from cause
        raise StorageError(f"{storage.uri} can't be read ({one_line(cause)}); try again") from cause
    settings = earlier.get("settings", {})
    check_repeated(config, settings)
    lacking = [flag(name) for name in KEPT if settings.get(name) and not getattr(config, name)]
    if lacking:
        note(f"the earlier command of this run also had {', '.join(lacking)}")
    before, script = settings.get("command"), config.command[0]
    if isinstance(before, list) and before and os.path.normpath(str(before[0])) != os.path.normpath(script):
        apart = "another --run-name keeps them apart"
        note(f"run {config.run_name} ran {before[0]} before, and {script} gets its files; {apart}")
    return earlier


@contextlib.contextmanager
def _interruptible(
    cluster: Cluster, name: str, started: Collection[bool], followers: Sequence[Follower]
) -> Generator[None]:
    """With --local, an interrupt of the block stops the run that this command has started, and another one kills it.

    Meanwhile a follower goes on with the log.
    """
    try:
        yield
    except (KeyboardInterrupt, Interrupted, SystemExit) as end:  # the latter by a signal
        if not (cluster.ends_with_command and started):
            raise
        was_under_way = False
        for screen in (out, notes):
            screen.ends_without_reader = False  # Ctrl-C ends what they are piped to, too
        with contextlib.suppress(Elsewhere), contextlib.ExitStack() as shown:
            jobs = cluster.jobs(note)
            try:
                time_left = f"whose script has {GRACE_SECONDS:.0f} s to save"
                note(f"stopping run {name}, {time_left}; press Ctrl-C again to kill it")
                for follower in followers:
                    shown.enter_context(follower.beside())
                was_under_way = stop_run(cluster, jobs, name)
            except KeyboardInterrupt as again:
                for job_id in jobs_of(cluster, jobs, name, "stop"):
                    jobs.kill_job(job_id)
                stop_run(cluster, jobs, name)  # waits for its end, and deletes its secrets
                raise Interrupted(f"run {name} was killed; {way_on(cluster, name)}") from again
        if isinstance(end, Interrupted) and not was_under_way:  # of the follower, which has seen it under way
            raise Interrupted(f"run {name} has ended; {cluster.command('runs')} shows its state") from end
        if not was_under_way or (isinstance(end, SystemExit) and end.code == HANGUP):
            raise
        raise Interrupted(f"run {name} is stopped; {way_on(cluster, name)}") from end


def _say_where(cluster: Cluster, name: str) -> None:
    """Print where the results of a run are, or the commands that show and copy them."""
    if not cluster.reads_path:
        note(f"results in {cluster.storage(name).uri}")
        return
    copies = "" if cluster.is_here else f", {cluster.command(f'fetch {name}')} copies it to this machine"
    note(f"{cluster.command(f'open {name}')} shows its report{copies}")


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
    *(click.Option([name], hidden=True) for name in ("--nnodes", "--nproc-per-node")),  # torchrun's
    click.Argument(
        ["command"],
        nargs=-1,
        type=click.UNPROCESSED,  # click.Path would look at the paths of the script's arguments
        shell_complete=lambda context, parameter, typed: [CompletionItem(typed, type="file")],
        metavar="SCRIPT [ARGUMENTS]",
    ),
]
command = RunCommand(
    "run",
    callback=_run,
    help=ABOUT,
    params=[*_own, *reversed(getattr(_run, "__click_params__", [])), *map(Setting, SETTINGS)],
    # torchrun's flags may have underscores
    context_settings={"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")},
)
