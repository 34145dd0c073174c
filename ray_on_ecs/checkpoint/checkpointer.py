"""Checkpointer of a script: asynchronous, sharded and exactly resumable; under the runner, torchrun or python.

Each rank copies its part of the state into host memory between two steps, and a thread stores it while training
continues. About once per second, rank 0 decides whether to save and broadcasts that through a Gloo process group.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_on_ecs import sdk
from ray_on_ecs.checkpoint.background import BackgroundSave, take_copy
from ray_on_ecs.checkpoint.collectives import Collectives, Pace
from ray_on_ecs.checkpoint.dcp import Reader
from ray_on_ecs.checkpoint.export import export_weights
from ray_on_ecs.checkpoint.index import (
    FORMAT,
    BestMode,
    CheckpointIndex,
    Manifest,
    Progress,
    as_json,
    differences,
    find_fault,
)
from ray_on_ecs.checkpoint.location import RUN_VARIABLE, open_file, open_folder
from ray_on_ecs.checkpoint.sampler import DistributedSampler
from ray_on_ecs.checkpoint.state import TrainingState
from ray_on_ecs.errors import one_line

# Before a failed save is repeated: storage that fails, such as a full disk, needs time, and each copy blocks training.
RETRY_SECONDS = 30.0
# Between two saves for events that make it more probable that a node is reclaimed.
EXTRA_SECONDS = 60.0
# For the save in progress when a script fails: less than the 30 s that the runner gives it after SIGTERM.
LAST_SECONDS = 20.0
LAST_ATTEMPTS = 3  # to store the last state of a training


class ResumeError(SystemExit):
    """The checkpoints belong to another training. Uncaught, it ends the script with exit status 2 and one line."""

    def __init__(self, line: str) -> None:
        super().__init__(2)
        self.line = line

    def __str__(self) -> str:
        return self.line


def saved_progress(folder: str | os.PathLike[str] | None = None) -> Progress:
    """Return the steps and epochs of the newest complete checkpoint, before the model is made; zeros without one.

    A script needs it that adds layers, unfreezes them or makes parameter groups in the middle of a training: it makes
    the model and the optimizer as they were, and then calls `Checkpointer.resume`.

    Args:
        folder: As for `Checkpointer`.
    """
    newest = CheckpointIndex(open_folder(folder), 1, None, "min", print).newest
    return Progress(newest[1]["step"], newest[1]["epoch"]) if newest else Progress()


class Checkpointer:
    """Saves a training and resumes it exactly. All ranks must create one and call the same methods.

    Args:
        folder: A folder that all nodes share, or `s3://bucket/prefix`; by default `checkpoints` in the run's folder in
            the storage, and outside a run in the working directory.
        model: The module, also under DDP, FSDP2 (`fully_shard`) or torch.compile.
        optimizer: Its optimizer.
        state: More objects with `state_dict` and `load_state_dict`, by name: schedulers, a `DistributedSampler`, a
            gradient scaler, other modules and their optimizers.
        keep_last: The number of newest checkpoints to keep.
        keep_best: A metric of `end_epoch` whose best checkpoint is kept as well.
        best_mode: "min" or "max".
        every_seconds: Seconds between two checkpoints within an epoch, or None.
        every_steps: Steps between two checkpoints, or None.
        config: The settings of the training; a resume with other settings is refused.
        save_frozen: Also save the model's parameters without `requires_grad`; False for a script that loads them
            before `resume`, such as the base model below LoRA adapters. One that is trained or changed later is saved.
        trust_pickle: Also save and load values of classes outside numbers, text, lists, dicts and tensors; loading them
            runs the code of all who can write to the folder.

    Attributes:
        step: Completed optimizer steps.
        epoch: Completed epochs.
        world_size: The number of ranks.
        should_stop: True once the training has to end, because nodes are being reclaimed, or the run's limit is near.
        uri: The folder of the checkpoints.
        blocked_seconds: The time for which saves have blocked the training.

    Raises:
        RuntimeError: There are several ranks, and torch.distributed is not initialized.
        ValueError: An argument is wrong, or the folder can't be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        state: Mapping[str, Any] | None = None,
        keep_last: int = 2,
        keep_best: str | None = None,
        best_mode: BestMode = "min",
        every_seconds: float | None = 300.0,
        every_steps: int | None = None,
        config: Mapping[str, Any] | None = None,
        save_frozen: bool = True,
        trust_pickle: bool = False,
    ) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            raise RuntimeError("there are several ranks: call torch.distributed.init_process_group before Checkpointer")
        if keep_last < 1 or best_mode not in ("min", "max"):
            raise ValueError(
                f"keep_last must be at least 1 and best_mode min or max, not {keep_last} and {best_mode!r}"
            )
        if (every_steps is not None and every_steps < 1) or (every_seconds is not None and every_seconds <= 0):
            raise ValueError(f"every_steps and every_seconds must be positive, not {every_steps} and {every_seconds}")
        self._extra = dict(state or {})
        self._config = as_json(config or {})
        self._keep_best = keep_best
        self._every_seconds = math.inf if every_seconds is None else every_seconds
        self._every_steps = every_steps
        self._storage = open_folder(folder)
        self._ranks = Collectives()
        self.world_size = self._ranks.world_size
        self._state = TrainingState(
            *(model, optimizer, self._extra, self._ranks.rank, self.world_size),
            saves_frozen=save_frozen,
            trusts_pickle=trust_pickle,
        )
        self._index: CheckpointIndex | None = None
        if self._ranks.rank == 0:
            self._index = CheckpointIndex(self._storage, keep_last, keep_best, best_mode, self._say)
        self._save = BackgroundSave(self._ranks, self._storage, self._index, self._say)
        self._samplers = [value for value in self._extra.values() if isinstance(value, DistributedSampler)]
        if any(sampler.world_size != self.world_size for sampler in self._samplers):
            raise ValueError("state: make the DistributedSampler after init_process_group; it has all samples now")
        self._pace = Pace()
        self._metrics: Mapping[str, Any] = {}
        self._samples = 0  # of the last step
        # Retention would delete the checkpoints of a training that starts from step 0 here.
        has_checkpoints = self._index is not None and bool(self._index.newest or self._index.unreadable)
        self._must_resume = self._ranks.broadcast(has_checkpoints)
        self._epoch_metrics: tuple[int, dict[str, float]] = (-1, {})
        self._is_due = False
        self._saved_for: set[str] = set()
        self._extra_at = -math.inf
        self._has_other_weights = False
        self._saved_step = 0
        self._taken_at = time.monotonic()
        self._is_closed = False
        self._is_of_run = folder is None and RUN_VARIABLE in os.environ
        self.step = 0
        self.epoch = 0
        self.should_stop = False
        self.uri = self._storage.uri
        self.blocked_seconds = 0.0
        sdk.register_checkpointer()
        atexit.register(self._leave)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._leave()

    def resume(self) -> bool:
        """Continue from the newest complete checkpoint; returns False if the folder has no checkpoint.

        A damaged checkpoint is skipped with a warning, and the one before it is used.

        Raises:
            ResumeError: The checkpoint has another format, other settings, another model or other data.
            OSError: It can't be read.
            ValueError: A value in `state` could only be loaded with `trust_pickle`.
        """
        self._state.plain_values()  # says so before the training, and not at its first save
        unreadable = self._ranks.broadcast(self._index.unreadable if self._index else None)
        if unreadable:
            name, version = unreadable
            self._refuse(
                f"{self.uri}/{name} has format {version}, and this version of ray-on-ecs reads {FORMAT}; use the "
                "version that saved it"
            )
        newest = self._newest_intact()
        self._must_resume = False
        if newest is None:
            self._state.leave_out_frozen()  # the script may have loaded them since
            return False
        name, manifest = newest
        changed = self._ranks.broadcast(differences(manifest["config"], self._config))
        if changed:
            self._refuse(f"{self.uri} has checkpoints of other settings: {changed}; use the same settings")
        mismatch = None
        try:
            self._state.restore(Reader(self._storage, name), manifest["world_size"])
        except ValueError as cause:
            mismatch = one_line(cause)
        mismatch = self._ranks.first(mismatch)
        if mismatch:
            self._refuse(f"{self.uri}/{name} does not fit this script: {mismatch}; use the script that saved it")
        self.step = self._saved_step = manifest["step"]
        self.epoch = manifest["epoch"]
        self._epoch_metrics = (self.step, manifest["metrics"])
        sdk.progress(self.step)  # an epoch whose last step was saved ends without another step
        if manifest["metrics"] and self._ranks.rank == 0:  # the record may be lost with a node
            sdk.write_report(self.step, manifest["metrics"], again=True)
        if manifest["world_size"] == self.world_size:
            for sampler in self._samplers:
                sampler.restore_random(partial(self._state.restore_random, self._state.random()))
        self._taken_at = time.monotonic()
        self._say(f"resuming after step {self.step} ({self.epoch} epochs) from {self.uri}/{name}")
        return True

    def after_step(self, samples: int = 0, **metrics: Any) -> bool:
        """Count a step, and save if a save is due; returns True if the training has to stop, after it has been saved.

        Args:
            samples: Samples of the step on all ranks; the samplers in `state` advance by them.
            **metrics: Numbers or tensors of one number; rank 0's are logged about once per second.

        Raises:
            DivergedError: A weight is not finite at a save.
            ValueError: A value in `state` could only be loaded with `trust_pickle`, `samples` is missing although
                `state` has a sampler, or `resume` was not called although there are checkpoints.
        """
        if self._samplers and samples < 1:
            raise ValueError(f"samples: {samples}; give the samples that all ranks have used, which a sampler counts")
        if self._must_resume:
            raise ValueError(f"{self.uri} has checkpoints: call resume() first, or give another folder or run name")
        self.step += 1
        self._samples = samples
        for sampler in self._samplers:
            sampler.position += samples
        sdk.progress(self.step)
        self._metrics = {name: _detached(value) for name, value in metrics.items()}
        is_step = self._every_steps is not None and self.step % self._every_steps == 0
        if self._pace.is_due() or is_step:
            self._poll(is_step)
        return self.should_stop

    def end_epoch(self, **metrics: Any) -> None:
        """End an epoch: log its metrics and save a checkpoint.

        While another save is in progress, the checkpoint follows after a later step, unless it is the best by
        `keep_best`: that one is saved at once.

        Raises:
            DivergedError: A weight is not finite.
        """
        self.epoch += 1
        for sampler in self._samplers:
            if sampler.counts_one_rank(self._samples):
                self._say("warning: after_step has counted the samples of one rank; give those of all ranks")
            sampler.set_epoch(self.epoch)
        values = {name: float(_detached(value)) for name, value in metrics.items()}
        if values:
            sdk.log(**values)
        if self._keep_best and values and self._keep_best not in values:
            raise ValueError(f"keep_best: there is no {self._keep_best!r} among the metrics {', '.join(values)}")
        self._epoch_metrics = (self.step, {name: value for name, value in values.items() if math.isfinite(value)})
        is_wanted = self._index is not None and (not self._save.is_busy or self._index.is_best(values))
        self._is_due = not self._ranks.broadcast(is_wanted)
        if not self._is_due:
            self.save()

    def save(self) -> None:
        """Save now; it is stored while training continues.

        Raises:
            DivergedError: A weight is not finite.
            ValueError: A value in `state` could only be loaded with `trust_pickle`.
        """
        began = time.monotonic()
        self._save.wait()
        epoch_end, metrics = self._epoch_metrics
        manifest: Manifest = {
            "format": FORMAT,
            "step": self.step,
            "epoch": self.epoch,
            "metrics": metrics if epoch_end == self.step else {},
            "world_size": self.world_size,
            "config": self._config,
            "left_out": 0,  # take_copy counts them
            "files": {},
        }
        self._save.start(take_copy(self._state, manifest, self._ranks, self._index))
        self._saved_step = self.step
        self._is_due = False
        self._taken_at = time.monotonic()
        self.blocked_seconds += self._taken_at - began

    def wait(self) -> bool:
        """Wait until the last checkpoint is stored; returns False if that failed."""
        self._save.wait()
        return self._save.error is None

    def load_best(self) -> bool:
        """Load the model's weights from the best checkpoint by `keep_best`; returns False without one.

        The last state is stored first. A training that continues from these weights can't be resumed exactly.

        Raises:
            OSError: The last state can't be stored, or the best one can't be read.
        """
        self._store_last()
        best = self._ranks.broadcast(self._index.best if self._index else None)
        if best is None:
            return False
        self._state.load_model(Reader(self._storage, best[0]))
        self._has_other_weights = True
        return True

    def export(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the model's weights as safetensors; all ranks take part.

        Args:
            path: A file, also `s3://bucket/key`; a relative path is in the run's folder in the storage, and outside a
                run in the working directory. A model above 2 GB becomes several files and an index, in Hugging Face's
                layout.
            metadata: Strings for the file's header, which `safetensors.safe_open(path, "pt").metadata()` returns.
            dtype: Data type of the parameters in the file; by default unchanged.

        Raises:
            OSError: It can't be written.
        """
        self._save.wait()
        storage, name = open_file(path)
        export_weights(self._state.module, storage, name, self._ranks, metadata=metadata, dtype=dtype)

    def close(self, export: str | os.PathLike[str] | None = None) -> None:
        """Store the last state, and export the weights unless the training has to stop.

        A run's folder then keeps only the last checkpoint and the best one: a finished run is not resumed.

        Raises:
            OSError: The state or the weights could not be stored.
        """
        if self._is_closed:
            return
        if not self._has_other_weights:
            self._store_last()
        if export is not None and not self.should_stop:
            self.export(export)
        if self._index is not None and not self.should_stop and self._is_of_run:
            self._index.end()
        self._close()

    def _store_last(self) -> None:
        """Store the state, in several attempts; OSError if all fail, unless the training has to stop."""
        for _ in range(LAST_ATTEMPTS):
            self._save.wait()
            if not self._ranks.broadcast(self._is_unsaved()) or self.should_stop:
                break
            self.save()
        self._save.wait()
        error = self._ranks.broadcast(self._save.error)
        if error and not self.should_stop:
            raise OSError(f"the last checkpoint could not be stored in {self.uri}: {error}")

    def _is_unsaved(self) -> bool:
        return self._saved_step != self.step or self._save.error is not None

    def _poll(self, is_step: bool) -> None:
        """Save or stop as rank 0 decides, on all ranks after the same step, and log its metrics."""
        is_wanted, deadline = self._pace.poll(self._ranks, partial(self._decide, is_step=is_step))
        if self._metrics and self._ranks.rank == 0:  # not after each step: reading them synchronizes the GPU
            sdk.log(**{name: float(value) for name, value in self._metrics.items()})
        self._metrics = {}
        if deadline is not None:
            self._stop(deadline)
        elif is_wanted:
            self.save()

    def _decide(self, seconds: float, events: set[str], is_step: bool) -> tuple[bool, float | None]:
        """Decide on rank 0, `seconds` before a node is reclaimed, on a save and the deadline of a stop (Unix time).

        There is one save for each event that makes it more probable that a node is reclaimed, at most one a minute.
        """
        elapsed = time.monotonic() - self._taken_at
        is_time = elapsed >= self._every_seconds or (self._save.error is not None and elapsed >= RETRY_SECONDS)
        deadline = None if math.isinf(seconds) else time.time() + seconds
        is_extra = not events <= self._saved_for and time.monotonic() - self._extra_at >= EXTRA_SECONDS
        is_wanted = is_step or ((is_time or self._is_due or is_extra) and not self._save.is_busy)
        if is_wanted and is_extra and deadline is None:
            self._say(f"a node may be reclaimed: saving after step {self.step}")
        if is_wanted:
            self._saved_for |= events
            self._extra_at = time.monotonic() if is_extra else self._extra_at
        return is_wanted, deadline

    def _stop(self, deadline: float) -> None:
        """Save before nodes are reclaimed."""
        self._say(f"the scripts are being ended: saving after step {self.step}")
        for _ in range(LAST_ATTEMPTS):
            has_ended = self._save.wait(deadline)
            if not self._ranks.broadcast(has_ended and self._is_unsaved() and time.time() < deadline):
                break
            self.save()
        self._save.wait(deadline)
        self.should_stop = True

    def _newest_intact(self) -> tuple[str, Manifest] | None:
        """Return the newest checkpoint whose files have their SHA-256; each rank reads some of them."""
        ranks = self._ranks
        while True:
            newest = ranks.broadcast(self._index.newest if self._index else None)
            if newest is None:
                return None
            name, manifest = newest
            files = sorted(manifest["files"])[ranks.rank :: ranks.world_size]
            fault = ranks.first(find_fault(self._storage, name, manifest["files"], files))
            if fault is None:
                return newest
            self._say(f"warning: {self.uri}/{name} is damaged ({fault}); the checkpoint before it is used")
            if self._index is not None:
                self._index.discard(name)

    def _leave(self) -> None:
        """Give the save in progress some seconds, then end it: the script has failed, or has not called `close`."""
        if self._is_closed:
            return
        if not self._save.wait(time.time() + LAST_SECONDS):
            self._save.give_up()
        self._close()

    def _close(self) -> None:
        atexit.unregister(self._leave)
        self._is_closed = True
        self._ranks.close()

    def _say(self, line: str) -> None:
        if self._ranks.rank == 0:
            print(f"ray-on-ecs: {line}", flush=True)

    def _refuse(self, line: str) -> NoReturn:
        line += ", or another run name" if RUN_VARIABLE in os.environ else ", or move the folder away"
        if self._ranks.rank == 0:
            print(f"ray-on-ecs: error: {line}", file=sys.stderr, flush=True)
        raise ResumeError(line)


def _detached(value: Any) -> Any:
    """Return a tensor without its graph, which would keep the step's activations in memory."""
    return value.detach() if isinstance(value, Tensor) else value
