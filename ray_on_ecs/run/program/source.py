"""Tells a Ray program from a script for every worker by its source."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

from ray_on_ecs.config import RunConfig
from ray_on_ecs.errors import UsageError

# Classes and functions of Ray Train and Ray Tune that start workers.
TUNE_RUN = "tune.run"
STARTERS = (
    *("DataParallelTrainer", "HorovodTrainer", "JaxTrainer", "LightGBMTrainer", "TensorflowTrainer", "TorchTrainer"),
    *("Tuner", "XGBoostTrainer", TUNE_RUN),
)


def with_driver(config: RunConfig) -> RunConfig:
    """Return the settings with --driver if the source calls for it; UsageError if one is not for Ray programs."""
    if config.driver:
        return config
    reason = driver_reason(config)
    if reason is None:
        return config
    try:
        return replace(config, driver=True)
    except UsageError as cause:
        raise UsageError(f"{cause} ({reason})") from cause


def driver_reason(config: RunConfig) -> str | None:
    """Return the reason why a script is a Ray program, or None if its source or the settings contradict."""
    if config.no_driver or config.mpi or config.no_python:
        return None
    script = config.folder / config.command[0]
    if config.module:
        script = config.folder / Path(*config.command[0].split("."))
        script = script / "__main__.py" if script.is_dir() else script.with_suffix(".py")
    call = first_start(script)
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


def first_start(script: Path) -> str | None:
    """Return where a script starts workers by Ray, such as `train.py:12 calls TorchTrainer`, or None."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return None
    imports_ray = False
    calls: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports_ray = imports_ray or any(alias.name.split(".")[0] == "ray" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imports_ray = imports_ray or (node.module or "").split(".")[0] == "ray"
        elif isinstance(node, ast.Call):
            called = node.func
            name = getattr(called, "id", None) or getattr(called, "attr", "")
            if name == "run" and isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == "tune":
                name = TUNE_RUN
            if name in STARTERS:
                calls.append((node.lineno, name))
    if not imports_ray or not calls:
        return None
    line, starter = min(calls)
    return f"{script.name}:{line} calls {starter}"
