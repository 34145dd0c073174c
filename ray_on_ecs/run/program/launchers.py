"""Launchers in a run's command, such as torchrun: what is left out, and what would train once on each worker."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path, PurePath

from ray_on_ecs.arguments import SHELLS
from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.program.source import EVERY_WORKER, RANKS, Source, source_of

PYTHON = ("python", "python3")
TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
# A launcher where a command begins, on a line of a shell.
LAUNCHER = re.compile(
    r"(?m)(?:^|[;&|(){`]|\b(?:if|while|until|then|do|else|exec|time|nohup|env|run|nice|timeout|stdbuf|numactl|srun|sudo)\s"
    r"(?:\s*(?:-[np]\s+\S+|-(?![np]\s)\S+|\d\S*)(?=\s))*)\s*(?:\w+=\S*\s+)*[\"']?(?:[\w.~${}-]*/)*"
    r"(torchrun|accelerate[ -]launch|deepspeed|composer|horovodrun|mpirun|mpiexec|ray-on-ecs run|colossalai run"
    r"|(?:fabric|lightning) run|tune run(?=\s.*--nproc[_-]per[_-]node)"
    r"|(?:python[\d.]*\s+(?:-\w\s+)*)?-m (?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch))"
    r"(?=[\"']?(?:\s|$))"
)
# Launchers that tell the script how to train, and flags of accelerate launch that only say where.
TELLING = re.compile(r"(?:fabric|lightning) run")
PLACES = re.compile(
    r"--(?:num_(?:processes|machines|cpu_threads_per_process)|machine_rank|main_process_(?:ip|port)|multi_gpu|gpu_ids"
    r"|same_network|rdzv_\w+|max_restarts|monitor_interval|module|no_python|role|tee|log_dir|quiet|debug)"
)
# Words of a launcher that joins others, if it begins on several workers with the right ones; 1 node is not several.
JOINS = re.compile(r"RANK\b|WORLD_SIZE|(?:nnodes|num[_-]machines|num[_-]nodes|hostfile)(?![ =]1(?![\d:]))")
# Words of a shell that decide whether something is run.
IN_DOUBT = re.compile(
    r"(?m)(?:^|[;&|(){]|\b(?:then|do|else)\s)\s*(?:if|case|while|until|test|exit|return)\b|\[ |\|\||\(\)\s*\{"
)
# Programs that start a launcher if they see several GPUs.
MAY_LAUNCH = re.compile(r"(?:\S*/)?(trl|axolotl train|llamafactory-cli train)(?=\s|$)")
# Words of a script that asks whether torchrun has started it.
OF_TORCHRUN = {"MASTER_ADDR", "TORCHELASTIC_RUN_ID", "is_torchelastic_launched"}
# Packages of PyTorch scripts that join no workers by themselves.
ALONE = {
    *("PIL", "cv2", "einops", "matplotlib", "numpy", "pandas", "safetensors", "scipy", "sklearn", "tensorboard"),
    *("tensorboardX", "torch", "torchaudio", "torchvision", "tqdm", "wandb", "yaml"),
}
# Functions of Python that start workers, and those that start a program.
SPAWNERS = re.compile(
    r"torch\.multiprocessing\.(?:spawn\.)?(?:spawn|start_processes)|ignite\.distributed\.(?:\w+\.)?spawn"
    r"|detectron2\.engine\.(?:launch\.)?launch|torch\.distributed\.launcher\b.*\.(?:elastic_launch|launch_agent)"
    r"|torch\.distributed\.elastic\.multiprocessing\.start_processes|torch\.distributed\.run\.(?:main|run)"
    r"|accelerate\.(?:launchers\.)?(?:notebook|debug)_launcher|torch_xla\..*spawn"
)
PROCESS = re.compile(r"(?!psutil\b)(?:.*\.)?Process")
PROGRAMS = re.compile(r"subprocess\.(?:run|Popen|call|check_call|check_output)|os\.(?:system|popen|exec\w+|spawn\w+)")


def leave_out(command: Sequence[str]) -> list[str]:
    """Return a typed command without torchrun or Python, which every run has; torchrun's flags become the run's."""
    words = list(command)
    if words[:1] == ["torchrun"]:
        return words[1:]
    if not words or words[0] not in PYTHON:
        return words
    rest = words[1:]
    while rest[:1] == ["-u"]:
        rest = rest[1:]
    if rest[:1] == ["-m"] and rest[1:2] and rest[1] in TORCHRUN:
        return rest[2:]
    return rest if rest and (rest[0] == "-m" or not rest[0].startswith("-")) else words


def told(words: Sequence[str]) -> str:
    """Return what a launcher tells the script beside its rank, such as `--mixed_precision`: without it, others train.

    The words are a command up to the script.
    """
    command = shlex.join(words)
    if TELLING.search(command):
        return "how to train"
    names = [word.partition("=")[0].replace("-", "_").replace("__", "--", 1) for word in words if word.startswith("--")]
    more = [name for name in dict.fromkeys(names) if not PLACES.fullmatch(name)]
    return ", ".join(more) if re.search(r"accelerate[ -]launch|accelerate\.commands\.launch", command) else ""


def nested(config: RunConfig) -> tuple[str, bool] | None:
    """Return what starts workers itself, such as `run.sh calls torchrun`, and whether it does so on each worker.

    None for a Ray program, and for a run whose workers are one, or one on each node.
    """
    if config.driver or config.mpi or config.workers == (1, 1) or config.per_node:
        return None
    commands = _commands(config)
    if found := LAUNCHER.search(commands):
        name = config.command[0]
        is_called = PurePath(name).name in SHELLS or is_shell_script(config.folder / name)
        what = f"{name} calls {found[1]}, which" if is_called else found[1]
        is_in_doubt = JOINS.search(commands) or (is_called and IN_DOUBT.search(commands))
        return f"{what} starts workers itself", not is_in_doubt
    if found := MAY_LAUNCH.match(commands):
        return f"{found[1]} starts workers itself where it sees several GPUs", False
    source = source_of(config)
    started = _started(source) if source else None
    if started and JOINS.search(shlex.join(config.command)):  # the command hands over the ranks
        return started[0], False
    return started


def trains_alone(config: RunConfig) -> bool:
    """Return whether each of several workers would train a separate model, as a script for one GPU does.

    Its source tells that for sure only if it imports neither modules of the folder nor packages that may join workers.
    """
    if config.driver or config.mpi or config.workers == (1, 1) or config.per_node:
        return False
    source = source_of(config)
    known = ALONE | sys.stdlib_module_names
    joins = EVERY_WORKER | RANKS | {"multiprocessing", "torch.multiprocessing"}
    return bool(source and "torch" in source.packages <= known and source.words.isdisjoint(joins))


def _started(source: Source) -> tuple[str, bool] | None:
    """Return as `nested` does, for Python's source: one that gives the ranks itself is its own launcher."""
    gives_ranks = not source.assigned.isdisjoint(RANKS) or any(
        keyword.arg in ("rank", "world_size")
        for call in source.calls
        if call.name.endswith("init_process_group") and isinstance(call.node, ast.Call)
        for keyword in call.node.keywords
    )
    reads_ranks = not source.words.isdisjoint(RANKS | OF_TORCHRUN)
    has_processes = any("multiprocessing" in call.name for call in source.calls)
    for call in source.calls:
        starts = bool(PROGRAMS.fullmatch(call.name))
        launcher = _launcher_of(call.node) if starts else ""
        given = [node.id for node in ast.walk(call.node) if isinstance(node, ast.Name)] if starts else ()
        named = next(filter(None, (_launcher_of(source.values[name]) for name in given if name in source.values)), "")
        is_own = gives_ranks and not reads_ranks and PROCESS.fullmatch(call.name)
        if launcher or named or is_own or SPAWNERS.fullmatch(call.name):
            is_known = bool(launcher) or (gives_ranks and (not is_own or has_processes))
            is_sure = is_known and not (named or reads_ranks) and source.is_certain(call)
            name = launcher or named or call.name.lstrip(".")
            return f"{source.name}:{call.line} calls {name}, which starts workers itself", is_sure
    return None


def _launcher_of(call: ast.expr) -> str:
    """Return the launcher that a call of Python starts alone, or an empty text."""
    words = [node.value for node in ast.walk(call) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = LAUNCHER.match(" ".join(words))
    return found[1] if found and not JOINS.search(" ".join(words)) else ""


def _commands(config: RunConfig) -> str:
    """Return the commands that a worker would type, as lines of a shell, as far as they can be read."""
    words = list(config.command)
    if config.module:
        return shlex.join(["python", "-m", *words])
    if not config.no_python:
        return ""
    if PurePath(words[0]).name in SHELLS:
        options = list(takewhile(lambda word: word.startswith("-"), words[1:]))
        words = words[1 + len(options) :]
        if words and any(re.fullmatch(r"-\w*c", option) for option in options):
            return _lines(words[0])
    script = config.folder / words[0] if words else config.folder
    return _lines(script.read_text(errors="replace")) if is_shell_script(script) else shlex.join(words)


def _lines(text: str) -> str:
    """Return a shell's text without comments, and with each command on one line."""
    return re.sub(r"(?m)(^|\s)#.*$", "", re.sub(r"\\\r?\n", " ", text))


def is_shell_script(path: Path) -> bool:
    """Return whether a file is a shell script, by its name or its first line."""
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return False
    return path.suffix in (".sh", ".bash") or re.match(rb"#!.*\b(?:ba|da|k|z)?sh\b", first) is not None
