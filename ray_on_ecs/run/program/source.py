"""Source of a script: its mistakes, and the calls that start workers, by Ray or as processes."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ray_on_ecs.config import RunConfig, python_path
from ray_on_ecs.errors import UsageError

# Classes and functions of Ray Train and Ray Tune that start workers.
TUNE_RUN = "tune.run"
STARTERS = (
    *("DataParallelTrainer", "HorovodTrainer", "JaxTrainer", "LightGBMTrainer", "TensorflowTrainer", "TorchTrainer"),
    *("Tuner", "XGBoostTrainer"),
)
# Other calls of a Ray program, unless the source also has what trains on every worker.
TASKS = (
    *("ray.init", "ray.remote", "ray.data.", "ray.rllib.algorithms.", "ray.rllib.examples.utils.", "ray.serve."),
    *("ray.util.joblib.", "ray.util.multiprocessing."),
)
EVERY_WORKER = {
    *("Accelerator", "DDP", "DistributedDataParallel", "FullyShardedDataParallel", "Trainer", "accelerate"),
    *("deepspeed", "fully_shard", "horovod", "init_process_group", "lightning", "mpi4py", "pytorch_lightning"),
    "torch.distributed",
}
# Variables by which a script learns that a launcher has started it.
RANKS = {"LOCAL_RANK", "RANK", "WORLD_SIZE"}


@dataclass(frozen=True)
class Call:
    """A call or a decorator."""

    line: int
    name: str  # in full, of what it calls, such as `torch.multiprocessing.spawn`
    node: ast.expr
    function: str  # in which it is, or nothing
    is_conditional: bool  # an `if` or a `try` decides about it

    @property
    def names(self) -> set[str]:
        """The functions that it may call: its own, and those that it is given."""
        given = self.node.args if isinstance(self.node, ast.Call) else []
        return {self.name.rpartition(".")[2], *(node.id for node in given if isinstance(node, ast.Name))}


class Source:
    """The source of a script.

    Attributes:
        imported: What is imported under each name, such as `torch.multiprocessing` under `mp`.
        packages: The packages that it imports from.
        assigned: The texts under which it assigns something, as in `os.environ["RANK"] = "0"`.
        values: What it assigns, by the name.
        words: The names in it, what it imports, and its other texts.
        calls: All calls.
    """

    def __init__(self, script: Path) -> None:
        """Read it; SyntaxError, ValueError or OSError if it can't be read as this Python's."""
        self.name = script.name
        tree = ast.parse(script.read_bytes(), script.name)
        self.imported: dict[str, str] = {}
        self.packages: set[str] = set()
        self.words: set[str] = set()
        self.assigned: set[str] = set()
        self.values = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        keys: set[int] = set()
        for node in ast.walk(tree):  # a subscript comes before its key
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    self.imported[alias.asname or top] = alias.name if alias.asname else top
                    self.packages.add(top)
                    self.words |= {top, alias.name}
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.packages.add(node.module.split(".")[0])
                self.words |= {node.module.split(".")[0], node.module}
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    self.words |= {alias.name, f"{node.module}.{alias.name}"}
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                keys.add(id(node.slice))
                self.assigned.add(getattr(node.slice, "value", ""))
            elif isinstance(node, ast.Name | ast.Attribute):
                self.words.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in keys:
                self.words.add(node.value)
        self.calls = list(self._find_calls(tree))

    def is_certain(self, call: Call) -> bool:
        """Return whether each start of the script reaches a call, as far as the source shows it."""
        certain = [each for each in self.calls if not each.is_conditional]
        reached, more = {""}, {""}
        while more:
            more = {name for each in certain if each.function in reached for name in each.names} - reached
            reached |= more
        return not call.is_conditional and call.function in reached

    def _find_calls(self, above: ast.AST, function: str = "", is_conditional: bool = False) -> Iterator[Call]:
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef):
            function, is_conditional = above.name, False
        elif isinstance(above, ast.If | ast.IfExp | ast.Try | ast.match_case):
            is_main = isinstance(above, ast.If) and "__name__" in ast.unparse(above.test)
            is_conditional = is_conditional or not is_main
        for decorator in getattr(above, "decorator_list", ()):
            if not isinstance(decorator, ast.Call):
                yield Call(decorator.lineno, self._full_name(decorator), decorator, function, is_conditional)
        for node in ast.iter_child_nodes(above):
            if isinstance(node, ast.Call):
                yield Call(node.lineno, self._full_name(node.func), node, function, is_conditional)
            yield from self._find_calls(node, function, is_conditional)
            if isinstance(node, ast.If) and any(isinstance(each, ast.Return) for each in ast.walk(node)):
                is_conditional = True

    def _full_name(self, node: ast.expr) -> str:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        first = node.id if isinstance(node, ast.Name) else ""
        return ".".join([self.imported.get(first, first), *parts])


def source_of(config: RunConfig) -> Source | None:
    """Return the source that a worker's Python would run, or None if it can't be read here."""
    if config.no_python:
        return None
    if config.module:
        name = os.path.join(*config.command[0].split("."))
        places = [config.folder / root / name for root in (".", *python_path(config.variables), "src")]
        files = [file for place in places for file in (place / "__main__.py", place.with_suffix(".py"))]
    else:
        script = config.folder / config.command[0]
        files = [script / "__main__.py", script]
    try:
        return Source(next(file for file in files if file.is_file()))
    except (OSError, RecursionError, StopIteration, SyntaxError, ValueError):
        return None


def with_driver(config: RunConfig, reason: str) -> RunConfig:
    """Return the settings with --driver, which has this reason; UsageError if one is not for Ray programs."""
    try:
        return replace(config, driver=True)
    except UsageError as cause:
        raise UsageError(f"{cause} ({reason})") from cause


def driver_reason(config: RunConfig) -> str | None:
    """Return the reason why a script is a Ray program, or None if its source or the settings contradict or say it."""
    if config.driver or config.no_driver or config.mpi:
        return None
    source = source_of(config)
    call = first_start(source) if source else None
    return call and f"{call}: a Ray program, which runs once, on the head; --no-driver starts it on every worker"


def syntax_error(config: RunConfig) -> str | None:
    """Return where this Python finds a mistake in a script's syntax, or None; for the script that it would run."""
    script = config.folder / config.command[0]
    if config.module or config.no_python or script.suffix != ".py":
        return None
    try:
        ast.parse(script.read_bytes(), script.name)
    except SyntaxError as cause:
        return f"SCRIPT: {config.command[0]}:{cause.lineno}: SyntaxError: {cause.msg}"
    except (OSError, ValueError):
        pass
    return None


def first_start(source: Source) -> str | None:
    """Return where a script starts workers by Ray, such as `train.py:12 calls TorchTrainer`, or None."""
    if "ray" not in source.packages:
        return None
    starts: list[tuple[int, str]] = []
    tasks: list[tuple[int, str]] = []
    for call in source.calls:
        last = TUNE_RUN if call.name.endswith(TUNE_RUN) else call.name.rpartition(".")[2]
        if last in (*STARTERS, TUNE_RUN):
            starts.append((call.line, last))
        elif call.name.startswith(TASKS):
            tasks.append((call.line, call.name))
    found = starts or ([] if source.words & (EVERY_WORKER | RANKS) else tasks)
    return f"{source.name}:{min(found)[0]} calls {min(found)[1]}" if found else None
