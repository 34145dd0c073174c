"""Checkpointer: a training that is interrupted at any step ends like one that is not."""

import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ray_on_ecs import Checkpointer, DistributedSampler, sdk
from ray_on_ecs.checkpoint import collectives, index
from ray_on_ecs.checkpoint.background import DivergedError
from ray_on_ecs.checkpoint.checkpointer import EXTRA_SECONDS, ResumeError
from ray_on_ecs.checkpoint.dcp import Reader, Writer
from ray_on_ecs.checkpoint.location import RUN_VARIABLE
from ray_on_ecs.run.metrics import MetricsLog
from tests.aws import BUCKET
from tests.ray_on_ecs.checkpoint.loop import STEPS, STEPS_PER_EPOCH, Stateful, difference, train
from tests.training.ranks import Ranks
from tests.waiting import LIMIT_SECONDS

State = dict[str, Any]


def farthest(first: State, second: State) -> float:
    """Return the largest difference between numbers of two state_dicts."""
    return max(float((first[name] - second[name]).abs().max()) for name in first if first[name].is_floating_point())


def save(folder: Path, **options: Any) -> None:
    checkpoint = Checkpointer(folder, **options)
    checkpoint.save()
    checkpoint.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "ranks", "ends"),
    [
        ("plain", 1, [STEPS_PER_EPOCH]),
        ("ddp", 2, [1, 3, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 5]),
        ("fsdp", 2, [1, STEPS_PER_EPOCH + 5]),
        ("fsdp", 3, [3]),
    ],
)
def test_interrupted_training_ends_with_the_same_bits(
    on_ranks: Ranks, tmp_path: Path, kind: str, ranks: int, ends: list[int]
) -> None:
    whole = on_ranks(ranks, train, tmp_path / "whole", kind)
    for end in ends:
        folder = tmp_path / str(end)
        on_ranks(ranks, partial(train, every_steps=1), folder, kind, end)
        again = on_ranks(ranks, train, folder, kind)
        assert again[0]["resumed"]
        assert min(again[0]["used"]) == end
        for rank in range(ranks):
            assert again[rank]["used"] == {k: v for k, v in whole[rank]["used"].items() if k >= end}
            assert not difference(again[rank]["weights"], whole[rank]["weights"]), (end, rank)


def test_ddp_on_three_ranks_ends_with_close_weights(on_ranks: Ranks, tmp_path: Path) -> None:
    whole = on_ranks(3, train, tmp_path / "whole", "ddp")
    on_ranks(3, partial(train, every_steps=1), tmp_path / "cut", "ddp", STEPS_PER_EPOCH + 5)
    again = on_ranks(3, train, tmp_path / "cut", "ddp")
    assert [each["used"] for each in again] == [
        {step: used for step, used in each["used"].items() if step >= STEPS_PER_EPOCH + 5} for each in whole
    ]
    assert farthest(again[0]["weights"], whole[0]["weights"]) < 1e-5


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_world_size_does_not_change_samples_per_step(on_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    run = partial(train, dropout=0.0)  # whose random numbers each rank has for itself
    whole = on_ranks(2, run, tmp_path / "whole", kind)
    on_ranks(2, partial(run, every_steps=1), tmp_path / "cut", kind, STEPS_PER_EPOCH + 5)
    for ranks in (1, 3):
        folder = shutil.copytree(tmp_path / "cut", tmp_path / str(ranks))
        again = on_ranks(ranks, run, folder, kind if ranks > 1 else "plain")
        for step in again[0]["used"]:
            assert {each for rank in again for each in rank["used"][step]} == {
                each for rank in whole for each in rank["used"][step]
            }
        assert farthest(again[0]["weights"], whole[0]["weights"]) < 1e-5


def test_a_damaged_checkpoint_is_passed_over(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(2, partial(train, every_steps=1), tmp_path, "ddp", 5)
    assert names(tmp_path) == ["step-000000004", "step-000000005"]
    part = tmp_path / "step-000000005" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-100])
    again = on_ranks(2, train, tmp_path, "ddp")
    assert min(again[0]["used"]) == 4
    lines = again[0]["said"]
    assert "step-000000005 is damaged (__1_0.distcp has " in lines
    assert "resuming after step 4 (0 epochs)" in lines


def announce(folder: Path, rank: int | None, seconds: float) -> None:
    """Announce in a rank's process, or in all, that its node is reclaimed, as the runner does."""
    tell(folder, rank, sdk.DEADLINE, str(time.time() + seconds))


def tell(folder: Path, rank: int | None, name: str, text: str) -> None:
    """Write a file for a rank's process, or for all, as the runner does."""
    import os

    if rank is None or torch.distributed.get_rank() == rank:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        os.environ[sdk.FOLDER_VARIABLE] = str(folder)
    else:
        os.environ.pop(sdk.FOLDER_VARIABLE, None)


def test_all_ranks_stop_on_one_reclaimed_node(on_ranks: Ranks, tmp_path: Path) -> None:
    whole = on_ranks(2, train, tmp_path / "whole", "ddp")
    told = on_ranks(2, partial(train, begin=partial(announce, tmp_path / "sdk", 1, 60)), tmp_path / "cut", "ddp")
    assert all(each["should_stop"] for each in told)
    assert told[0]["step"] == told[1]["step"] < STEPS
    assert (tmp_path / "sdk" / sdk.CHECKPOINTER).exists()
    again = on_ranks(2, partial(train, begin=partial(announce, tmp_path / "sdk", 7, 0)), tmp_path / "cut", "ddp")
    assert min(again[0]["used"]) == told[0]["step"]
    assert not difference(again[0]["weights"], whole[0]["weights"])


def test_all_ranks_save_for_an_event_of_one_and_go_on(on_ranks: Ranks, tmp_path: Path) -> None:
    begin = partial(tell, tmp_path / "sdk", 1, sdk.EXTRA_SAVE, "2020-10-27T08:22:00Z")
    told = on_ranks(2, partial(train, begin=begin, every_seconds=None), tmp_path / "cut", "ddp", STEPS_PER_EPOCH - 1)
    assert [(each["step"], each["should_stop"]) for each in told] == [(STEPS_PER_EPOCH - 1, False)] * 2
    assert names(tmp_path / "cut") == ["step-000000001"]


def test_each_event_has_one_save(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collectives, "POLL_SECONDS", 0.0)
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    checkpoint = Checkpointer(tmp_path / "checkpoints", model=model, every_seconds=None, keep_last=9)
    for event in ("", "first", "first", "second", "third", "third"):
        checkpoint._extra_at -= EXTRA_SECONDS / 2  # of two events within a minute, the later one waits
        (tmp_path / sdk.EXTRA_SAVE).write_text(event)
        assert not checkpoint.after_step()
        assert checkpoint.wait()
    assert names(tmp_path / "checkpoints") == ["step-000000002", "step-000000004", "step-000000006"]
    text = "ray-on-ecs: a node may be reclaimed: saving after step {}"
    assert capsys.readouterr().out.splitlines() == [text.format(step) for step in (2, 4, 6)]


def test_event_waits_for_the_save_in_progress(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "POLL_SECONDS", 0.0)
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    checkpoint = Checkpointer(tmp_path / "checkpoints", model=model, every_seconds=None, keep_last=9)
    (tmp_path / sdk.EXTRA_SAVE).write_text("event")
    monkeypatch.setattr(type(checkpoint._save), "is_busy", True)
    checkpoint.after_step()
    assert not (tmp_path / "checkpoints").exists()
    monkeypatch.setattr(type(checkpoint._save), "is_busy", False)
    checkpoint.after_step()
    assert checkpoint.wait()
    assert names(tmp_path / "checkpoints") == ["step-000000002"]


def spoil(rank: int, ranks: int, folder: Path) -> str:
    """Save a model that has a wrong number on one rank; returns the error."""
    model = nn.Linear(2, 2)
    if rank == 1:
        with torch.no_grad():
            model.weight[0, 0] = math.nan
    checkpoint = Checkpointer(folder, model=model)
    checkpoint.step = 7
    with pytest.raises(DivergedError) as found:
        checkpoint.save()
    return str(found.value)


def test_nonfinite_weights_fail_on_all_ranks(on_ranks: Ranks, tmp_path: Path) -> None:
    errors = on_ranks(2, spoil, tmp_path)
    assert set(errors) == {"weights of rank 1 are not finite after step 7; they are not saved"}
    assert not list(tmp_path.iterdir())


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def test_retention_keeps_best_and_latest(model: nn.Linear, tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, model=model, keep_last=2, keep_best="accuracy", best_mode="max")
    for accuracy in (0.5, 0.9, 0.8, 0.9, 0.7):
        checkpoint.after_step()
        with torch.no_grad():
            model.weight.fill_(accuracy)
        checkpoint.end_epoch(accuracy=accuracy)
        checkpoint.wait()
    assert names(tmp_path) == ["step-000000002", "step-000000004", "step-000000005"]
    assert checkpoint.load_best()
    assert model.weight[0, 0].item() == pytest.approx(0.9)
    checkpoint.close()
    assert names(tmp_path) == ["step-000000002", "step-000000004", "step-000000005"]


@pytest.mark.parametrize(("stops", "kept"), [(False, [1, 3]), (True, [1, 2, 3])], ids=["finished", "interrupted"])
def test_finished_run_keeps_last_and_best(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool, kept: list[int]
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, str(tmp_path))
    checkpoint = Checkpointer(model=model, keep_last=2, keep_best="loss")
    for loss in (0.1, 0.3, 0.2):
        checkpoint.after_step()
        checkpoint.end_epoch(loss=loss)
        checkpoint.wait()
    checkpoint.should_stop = stops
    checkpoint.close()
    assert names(tmp_path / "checkpoints") == [f"step-{step:09d}" for step in kept]


def saved(model: nn.Linear, folder: Path) -> None:
    """Save a checkpoint after each of two steps; the model's weights are the number of the step."""
    checkpoint = Checkpointer(folder, model=model)
    for step in (1, 2):
        checkpoint.after_step()
        nn.init.constant_(model.weight, step)
        checkpoint.save()
        checkpoint.wait()
    checkpoint.close()


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:100]), "has 100 of"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"?"), "has another SHA-256"),
        (lambda file: file.unlink(), "is missing"),
    ],
    ids=["truncated", "changed", "lost"],
)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_each_damage_of_a_file_is_named(
    model: nn.Linear, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, harm: Any, word: str
) -> None:
    saved(model, tmp_path)
    harm(tmp_path / "step-000000002" / name)
    checkpoint = Checkpointer(tmp_path, model=model)
    assert checkpoint.resume()
    assert (checkpoint.step, model.weight[0, 0].item()) == (1, 1.0)
    assert f"step-000000002 is damaged ({name} {word}" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"format": 1, "files": {}}', '{"format": "2"}'])
def test_checkpoint_without_whole_manifest_is_deleted(model: nn.Linear, tmp_path: Path, content: str | None) -> None:
    saved(model, tmp_path)
    manifest = tmp_path / "step-000000002" / "checkpoint.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    checkpoint = Checkpointer(tmp_path, model=model)
    assert checkpoint.resume()
    assert checkpoint.step == 1
    checkpoint.after_step()
    checkpoint.close()
    assert names(tmp_path) == ["step-000000001", "step-000000002-1"]


def test_checkpoint_of_another_format_is_refused_and_kept(model: nn.Linear, tmp_path: Path) -> None:
    saved(model, tmp_path)
    (tmp_path / "step-000000002" / "checkpoint.json").write_text('{"format": 2}')
    checkpoint = Checkpointer(tmp_path, model=model)
    with pytest.raises(ResumeError, match="step-000000002 has format 2, and this version of ray-on-ecs reads 1"):
        checkpoint.resume()
    with pytest.raises(ValueError, match="call resume"):
        checkpoint.after_step()
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_only_damaged_checkpoints_start_from_scratch(model: nn.Linear, tmp_path: Path) -> None:
    saved(model, tmp_path)
    for file in tmp_path.glob("*/__0_0.distcp"):
        file.write_bytes(b"")
    nn.init.constant_(model.weight, 7)
    checkpoint = Checkpointer(tmp_path, model=model)
    assert not checkpoint.resume()
    assert (checkpoint.step, model.weight[0, 0].item()) == (0, 7.0)


def lose_a_part(rank: int, ranks: int, folder: Path) -> str | None:
    """Save while the last rank can't write its part, and once more; returns the first reason."""
    checkpoint = Checkpointer(folder, model=nn.Linear(2, 2))
    with pytest.MonkeyPatch.context() as patch:
        if rank == ranks - 1:
            patch.setattr(Writer, "write_data", Mock(side_effect=OSError("slow down")))
        checkpoint.save()
        checkpoint.wait()
    reason = checkpoint._save.error
    assert rank > 0 or not list(folder.iterdir()), "the parts of the others are gone"
    checkpoint.close()
    return reason


def test_failed_part_is_stored_again_by_all(on_ranks: Ranks, tmp_path: Path) -> None:
    assert on_ranks(2, lose_a_part, tmp_path) == ["slow down", "slow down"]
    assert len(list(tmp_path.glob("*/checkpoint.json"))) == 1


def test_a_full_disk_costs_the_checkpoint_alone(
    model: nn.Linear, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Checkpointer(tmp_path, model=model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for _ in range(3):
            checkpoint.save()
            checkpoint.wait()
            assert names(tmp_path) == [], "failed saves don't fill it"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step-000000000 could not be stored (" in capsys.readouterr().out
    checkpoint.close()
    assert Checkpointer(tmp_path, model=model).resume(), "there is room again"


def test_parts_of_an_earlier_start_make_room_for_the_first_save(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(model, tmp_path)
    for name in ("step-000000002-1", "step-000000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").touch()
    harmed = tmp_path / "step-000000002" / "__0_0.distcp"
    harmed.write_bytes(b"")
    checkpoint = Checkpointer(tmp_path, model=model)
    assert checkpoint.resume()
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write_data", Mock(side_effect=OSError("slow down")))
        checkpoint.after_step()
        checkpoint.save()
        checkpoint.wait()
    assert names(tmp_path) == ["step-000000001", "step-000000002"], "a damaged one stays until the commit"
    checkpoint.close()
    assert names(tmp_path) == ["step-000000001", "step-000000002-3"]


def test_a_checkpoint_needs_no_temporary_file(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    save(tmp_path, model=model)
    assert Checkpointer(tmp_path, model=model).resume()


def test_a_bucket_that_loses_calls_has_whole_checkpoints(model: nn.Linear, s3: Any) -> None:
    folder = f"s3://{BUCKET}/lossy/checkpoints"
    checkpoint = Checkpointer(folder, model=model)
    for _ in range(4):
        checkpoint.after_step()
        checkpoint.save()
    checkpoint.close()
    again = Checkpointer(folder, model=model)
    assert again.resume()
    assert again.step == 4
    assert {key.split("/")[2] for key in keys(s3, "lossy")} == {"step-000000003", "step-000000004"}


def keys(s3: Any, prefix: str) -> list[str]:
    return [stored["Key"] for stored in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"] if stored["Size"]]


def test_reading_a_checkpoint_sends_heartbeats(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, model=model)
    signs: list[None] = []
    monkeypatch.setattr(sdk, "alive", lambda: signs.append(None))
    monkeypatch.setattr(index, "CHUNK_BYTES", 1000)
    assert Checkpointer(tmp_path, model=model).resume()
    assert len(signs) > sum(path.stat().st_size for path in tmp_path.glob("*/*")) // 1000


def bytes_read(rank: int, ranks: int, folder: Path) -> int:
    """Resume a sharded training; returns the bytes that this rank has read of its state."""
    read: list[int] = []
    slice_file = Reader._slice_file

    def count(self: Reader, file: Any, sinfo: Any) -> Any:
        read.append(sinfo.length)
        return slice_file(self, file, sinfo)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "_slice_file", count)
        train(rank, ranks, folder, "fsdp")
    return sum(read)


def test_a_rank_reads_only_its_shards(on_ranks: Ranks, tmp_path: Path) -> None:
    on_ranks(2, partial(train, every_steps=1), tmp_path, "fsdp", 5)
    size = sum(path.stat().st_size for path in tmp_path.glob("step-000000005/*.distcp"))
    for read in on_ranks(2, bytes_read, tmp_path):
        assert 0 < read < 0.7 * size


def test_missing_keep_best_metric_is_named(model: nn.Linear, tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, model=model, keep_best="accuracy")
    with pytest.raises(ValueError, match="keep_best: there is no 'accuracy' among the metrics loss"):
        checkpoint.end_epoch(loss=1.0)


def test_other_settings_are_refused_in_one_line(
    model: nn.Linear, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"lr": 0.1, "data": Path("/data"), "layers": [1, 2]}
    save(tmp_path, model=model, config=settings)
    with Checkpointer(tmp_path, model=model, config=settings) as same_settings:
        assert same_settings.resume()
    other = Checkpointer(tmp_path, model=model, config={**settings, "lr": 0.2, "seed": 1})
    with pytest.raises(ResumeError) as refused:
        other.resume()
    assert refused.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "lr was 0.1 and is 0.2, seed was not set and is 1; use the same settings, or move the folder away"
    )


class StatefulDataLoader(Stateful):
    """By its name one of torchdata's."""


@pytest.mark.parametrize(
    ("model", "state", "named"),
    [
        (
            nn.Linear(3, 2),
            {"counter": Stateful()},
            "model.weight is torch.float32 (2, 3), and in the ch",
        ),
        (
            nn.Linear(2, 2).bfloat16(),
            {"counter": Stateful()},
            "model.weight is torch.bfloat16 (2, 2), and in",
        ),
        (nn.Linear(2, 2, bias=False), {"counter": Stateful()}, "the checkpoint has model.bias, and the model has not"),
        (nn.Linear(2, 2), {}, "the checkpoint has the state state.counter, and this script nothing"),
        (
            nn.Linear(2, 2),
            {"counter": Stateful(), "sampler": DistributedSampler([1])},
            "the checkpoint has the state state.counter, and this script state.counter, state.sampler",
        ),
    ],
    ids=["shape", "dtype", "name", "less", "more"],
)
def test_checkpoint_of_another_training_is_refused(
    model: nn.Module, state: State, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, model=nn.Linear(2, 2), state={"counter": Stateful()})
    with pytest.raises(ResumeError):
        Checkpointer(tmp_path, model=model, state=state).resume()
    [line] = capsys.readouterr().err.splitlines()
    assert named in line


def resume_loader(rank: int, ranks: int, folder: Path) -> str:
    checkpoint = Checkpointer(folder, model=nn.Linear(2, 2), state={"loader": StatefulDataLoader()})
    with pytest.raises(ResumeError) as refused:
        checkpoint.resume()
    return str(refused.value)


def test_stateful_data_loader_needs_the_same_world_size(on_ranks: Ranks, tmp_path: Path) -> None:
    save(tmp_path, model=nn.Linear(2, 2), state={"loader": StatefulDataLoader()})
    lines = on_ranks(2, resume_loader, tmp_path)
    assert all(
        "state.loader is a StatefulDataLoader, which can't resume on another number of ranks" in x for x in lines
    )


def test_extra_state_is_restored(tmp_path: Path) -> None:
    def build(value: int) -> tuple[Checkpointer, nn.Module, torch.optim.Optimizer, Stateful]:
        torch.manual_seed(value)
        model, critic, counter = nn.Linear(2, 2), nn.Linear(2, 1), Stateful(value)
        second = torch.optim.SGD(critic.parameters(), lr=value, momentum=0.9)
        critic(torch.ones(2)).backward()
        second.step()
        state = {"critic": critic, "second": second, "counter": counter}
        return Checkpointer(tmp_path, model=model, state=state), critic, second, counter

    first, critic, second, _ = build(3)
    first.save()
    first.close()
    resumed, other_critic, other_second, counter = build(4)
    assert resumed.resume()
    assert counter.value == 3
    assert not difference(critic.state_dict(), other_critic.state_dict())
    assert other_second.param_groups[0]["lr"] == 3
    for one, other in zip(second.state.values(), other_second.state.values(), strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"state": {"x": 3}}, TypeError, "state.x: a int has no state_dict and load_state_dict"),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(3))])},
            ValueError,
            "a parameter of shape (3,) belongs",
        ),
        ({"keep_last": 0}, ValueError, "keep_last must be at least 1"),
        ({"every_steps": 0}, ValueError, "every_steps and every_seconds must be positive"),
        ({"folder": "s3://bucket"}, ValueError, "folder: 's3://bucket' is not a folder"),
        ({"folder": "gs://bucket/a"}, ValueError, "folder: 'gs://bucket' can't be written"),
    ],
    ids=["state", "optimizer", "keep_last", "every_steps", "bucket", "other storage"],
)
def test_a_wrong_argument_is_named(
    model: nn.Linear, tmp_path: Path, options: State, error: type[Exception], named: str
) -> None:
    folder = options.pop("folder", tmp_path)
    with pytest.raises(error) as found:
        Checkpointer(folder, model=model, **options)
    assert named in str(found.value)


def test_a_launcher_without_process_group_is_named(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group before Checkpointer"):
        Checkpointer(tmp_path, model=model)


def test_default_folder_of_checkpoints(model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Checkpointer(model=model).uri == f"{tmp_path}/checkpoints"
    monkeypatch.setenv("RUN_URI", f"{tmp_path}/runs/first")
    checkpoint = Checkpointer(model=model)
    assert checkpoint.uri == f"{tmp_path}/runs/first/checkpoints"
    checkpoint.close(export="model.safetensors")
    assert names(tmp_path / "runs" / "first") == ["model.safetensors"]


def test_metrics_and_steps_reach_the_run(model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    checkpoint = Checkpointer(tmp_path / "checkpoints", model=model)
    checkpoint.after_step(loss=torch.tensor(0.5, requires_grad=True))
    checkpoint.end_epoch(val_loss=0.25)
    checkpoint.close()
    reports = [json.loads(line) for line in (tmp_path / sdk.REPORTS).read_text().splitlines()]
    assert [report["values"] for report in reports if "values" in report] == [{"loss": 0.5}, {"val_loss": 0.25}]
    assert {report["step"] for report in reports} - {None} == {1}


def test_storage_failure_raises_only_at_close(
    model: nn.Linear, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    checkpoint = Checkpointer(tmp_path / "file" / "checkpoints", model=model, every_steps=1)
    for _ in range(3):
        checkpoint.after_step()
    assert "step-000000001 could not be stored (" in capsys.readouterr().out
    with pytest.raises(OSError, match="the last checkpoint could not be stored in "):
        checkpoint.close()


def test_storing_a_checkpoint_sends_heartbeats(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sdk, "PROGRESS_SECONDS", 0.0)
    checkpoint = Checkpointer(tmp_path / "checkpoints", model=model)
    checkpoint.save()
    assert checkpoint.wait()
    reports = [json.loads(line) for line in (tmp_path / sdk.REPORTS).read_text().splitlines()]
    assert {report["step"] for report in reports} == {None}


def test_uncounted_samples_are_an_error(model: nn.Linear, tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, model=model, state={"sampler": DistributedSampler(range(4))})
    with pytest.raises(ValueError, match="samples: 0; give the samples that all ranks have used"):
        checkpoint.after_step()


def test_sampler_before_the_process_group_is_refused(model: nn.Linear, tmp_path: Path) -> None:
    sampler = DistributedSampler(range(4))
    sampler.world_size = 2
    with pytest.raises(ValueError, match="make the DistributedSampler after init_process_group"):
        Checkpointer(tmp_path, model=model, state={"sampler": sampler})


def test_step_without_resume_is_refused(model: nn.Linear, tmp_path: Path) -> None:
    save(tmp_path, model=model)
    other = Checkpointer(tmp_path, model=model)
    with pytest.raises(ValueError, match=r"has checkpoints: call resume\(\) first"):
        other.after_step()
    assert names(tmp_path) == ["step-000000000"]


def test_load_best_stores_the_last_state_first(model: nn.Linear, tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, model=model, keep_best="loss", every_seconds=None)
    for weight in (1.0, 2.0):
        checkpoint.after_step()
        with torch.no_grad():
            model.weight.fill_(weight)
        if weight == 1.0:
            checkpoint.end_epoch(loss=0.0)
    assert checkpoint.load_best()
    checkpoint.close()
    assert Checkpointer(tmp_path, model=model).resume()
    assert model.weight[0, 0].item() == 2.0


def test_second_save_of_a_step_keeps_metrics(model: nn.Linear, tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, model=model, keep_last=1, keep_best="loss")
    checkpoint.after_step()
    checkpoint.end_epoch(loss=0.5)
    checkpoint.wait()
    assert names(tmp_path) == ["step-000000001"]
    checkpoint.save()
    checkpoint.wait()
    assert names(tmp_path) == ["step-000000001-1"]
    assert checkpoint.load_best()
    checkpoint.close()
    again = Checkpointer(tmp_path, model=model, keep_last=1, keep_best="loss")
    again.resume()
    again.save()
    assert again.load_best()


def test_epoch_end_during_a_save_is_saved_later(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    write = Writer.write_data

    def held(*arguments: Any) -> Any:
        assert goes_on.wait(LIMIT_SECONDS)
        return write(*arguments)

    monkeypatch.setattr(Writer, "write_data", held)
    monkeypatch.setattr(collectives, "POLL_SECONDS", 0.0)
    checkpoint = Checkpointer(tmp_path, model=model, every_seconds=None)
    checkpoint.after_step()
    checkpoint.end_epoch()
    checkpoint.after_step()
    checkpoint.end_epoch()
    goes_on.set()
    checkpoint.wait()
    checkpoint.after_step()
    checkpoint.wait()
    assert names(tmp_path) == ["step-000000001", "step-000000003"]


def settings_of_rank(rank: int, ranks: int, folder: Path) -> bool:
    checkpoint = Checkpointer(folder, model=nn.Linear(2, 2), config={"device": f"cuda:{rank}"})
    resumed = checkpoint.resume()
    checkpoint.save()
    checkpoint.close()
    return resumed


def test_settings_are_rank_0s(on_ranks: Ranks, tmp_path: Path) -> None:
    assert on_ranks(2, settings_of_rank, tmp_path) == [False, False]
    assert on_ranks(2, settings_of_rank, tmp_path) == [True, True]


def test_settings_of_any_kind_are_compared(model: nn.Linear, tmp_path: Path) -> None:
    config = {"clip": math.inf, "main": save, "of": Stateful(), "parts": {"b", "a"}, "nested": {"path": tmp_path}}
    save(tmp_path, model=model, config=config)
    assert Checkpointer(tmp_path, model=model, config={**config, "of": Stateful()}).resume()


class Masked(nn.Linear):
    """A layer with a buffer of infinities, as a causal mask is."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -math.inf))


def test_a_mask_of_infinities_is_saved(tmp_path: Path) -> None:
    save(tmp_path, model=Masked())
    assert Checkpointer(tmp_path, model=Masked()).resume()


def test_the_best_weights_are_loaded_beside_other_modules(model: nn.Linear, tmp_path: Path) -> None:
    checkpoint = Checkpointer(tmp_path, model=model, state={"critic": nn.Linear(2, 1)}, keep_best="loss")
    checkpoint.after_step()
    checkpoint.end_epoch(loss=1.0)
    assert checkpoint.load_best()


def test_another_optimizer_is_refused(model: nn.Linear, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ResumeError):
        Checkpointer(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters())).resume()
    assert "optimizer was of class SGD, and is of class AdamW now" in capsys.readouterr().err


def test_saves_by_steps_keep_the_poll_interval() -> None:
    ranks, pace = collectives.Collectives(), collectives.Pace()
    for _ in range(3000):
        pace.is_due()
        pace.poll(ranks, lambda *_: None)
    assert pace.is_due() or pace.is_due()


# Ends while its checkpoint is being stored.
ENDS = """
import sys, threading, torch
from ray_on_ecs import Checkpointer
from ray_on_ecs.checkpoint import checkpointer, dcp

checkpointer.LAST_SECONDS = 0.1
begun = threading.Event()

def slow(self, data):
    begun.set()
    while True:
        self._heartbeat()

dcp._Hashed.write = slow
checkpoint = Checkpointer(sys.argv[1], model=torch.nn.Linear(2, 2))
checkpoint.save()
begun.wait()
sys.exit(3)
"""


def test_exit_during_a_save_keeps_the_exit_status(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 3, done.stderr


def test_epoch_end_after_a_resume_has_its_step(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpointer(tmp_path / "checkpoints", model=model)
    checkpoint.after_step()
    checkpoint.close()
    monkeypatch.setattr(sdk, "_step", None)  # as in a new process
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    checkpoint = Checkpointer(tmp_path / "checkpoints", model=model)
    checkpoint.resume()
    checkpoint.end_epoch(val_loss=0.25)
    checkpoint.close()
    reports = [json.loads(line) for line in (tmp_path / sdk.REPORTS).read_text().splitlines()]
    assert {"step": 1, "values": {"val_loss": 0.25}} in reports


def test_resume_reports_the_checkpoints_metrics_again(
    model: nn.Linear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpointer(tmp_path / "checkpoints", model=model)
    checkpoint.after_step()
    checkpoint.end_epoch(val_loss=0.25)
    checkpoint.close()
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path))
    Checkpointer(tmp_path / "checkpoints", model=model).resume()
    log = MetricsLog({})
    for line in (tmp_path / sdk.REPORTS).read_text().splitlines():
        log.take_report(json.loads(line))
    assert [(record["step"], record["val_loss"]) for record in log.records] == [(1, 0.25)]
