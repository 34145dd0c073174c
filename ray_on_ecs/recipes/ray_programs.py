"""Storage path, workers and run folder of a Ray program, under `ray-on-ecs run` as well as by `python`."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from ray_on_ecs.recipes.options import fail


def storage_path(text: str) -> str:
    """Return a bucket's name, s3://bucket/prefix or a folder, which has a slash or exists, as Ray's storage path.

    It is a type for an option: a bucket that does not exist is an error of one line.
    """
    if "://" not in text:
        if "/" in text or Path(text).is_dir():
            return str(Path(text).expanduser().absolute())
        if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", text):
            raise argparse.ArgumentTypeError(f"{text!r} is neither a bucket nor a folder; write a folder as ./{text}")
        text = f"s3://{text}"

    from pyarrow.fs import FileSystem, FileType

    try:
        filesystem, path = FileSystem.from_uri(text)
        exists = filesystem.get_file_info(path.partition("/")[0]).type is not FileType.NotFound
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from None
    if not exists:
        raise argparse.ArgumentTypeError(f"{text}: this bucket does not exist")
    return text.rstrip("/")


def run_name(text: str) -> str:
    """Return the name of a run, which is that of a folder: it is a type for an option."""
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not of letters, digits, dots, dashes and underscores")
    return text


def choose_workers(num_workers: int | None = None, *, use_gpu: bool | None = None) -> dict[str, Any]:
    """Return `num_workers` and `use_gpu` of Ray Train's ScalingConfig; Ray has to be initialized.

    By default a worker for each GPU: on a stack as many as a script would get, which start for the program, elsewhere
    those that the cluster has. Without GPUs two workers, or one on a single CPU.
    """
    import ray

    resources = ray.cluster_resources()
    cpus, gpus = (int(resources.get(kind, 0)) for kind in ("CPU", "GPU"))
    gpus = int(os.environ.get("STACK_GPUS", "0")) or gpus
    use_gpu = gpus > 0 if use_gpu is None else use_gpu
    number = num_workers or (gpus if use_gpu else min(2, cpus))
    if not number or not (use_gpu or cpus):
        fail("the cluster has no workers at the moment; --num-workers N --use-gpu waits for them", status=1)
    return {"num_workers": number, "use_gpu": use_gpu}


def run_folder(result: Any) -> tuple[Any, str]:
    """Return the file system of pyarrow and the path of the run's folder: without a run, that of Ray's result."""
    from pyarrow.fs import FileSystem

    if uri := os.environ.get("RUN_URI"):
        return FileSystem.from_uri(uri)
    return result.filesystem, result.path
