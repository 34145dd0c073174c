import struct
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event  # ty: ignore[missing-module-member]

from training.recipes.language.recipe import LANGUAGE
from training.tensorboard import event_file, scalars


def epoch(number: int, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(scalars(LANGUAGE).values(), 0.5)
    return {**values, "epoch": number, "finished": f"2026-01-02T03:04:0{number}.000+00:00", **changes}


def events(content: bytes) -> list[Event]:
    """What TensorBoard reads: records of a length, its checksum, an event, and the event's checksum."""
    found = []
    while content:
        [length] = struct.unpack("<Q", content[:8])
        found.append(Event.FromString(content[12 : 12 + length]))
        content = content[16 + length :]
    return found


def written(content: bytes) -> dict[tuple[str, int], tuple[float, float]]:
    """Value and time by tag and step."""
    return {
        (value.tag, event.step): (value.simple_value, event.wall_time)
        for event in events(content)
        for value in event.summary.value
    }


def test_every_metric_of_every_epoch_is_there_at_the_time_it_was_finished() -> None:
    found = written(event_file([epoch(0), epoch(1, test_bits_per_byte=0.75)], LANGUAGE))
    assert set(found) == {(tag, step) for tag in scalars(LANGUAGE) for step in (0, 1)}
    assert found["bits_per_byte/test", 1][0] == pytest.approx(0.75)
    assert found["bits_per_byte/test", 1][1] - found["bits_per_byte/test", 0][1] == pytest.approx(1)


def test_what_a_machine_has_not_is_left_out() -> None:
    found = written(event_file([epoch(0, gpu_memory_bytes=None)], LANGUAGE))
    assert ("gpu_memory_bytes", 0) not in found
    assert len(found) == len(scalars(LANGUAGE)) - 1


def test_a_recipe_has_metrics_of_its_own() -> None:
    assert {("speed/tokens_per_second", 0), ("bits_per_byte/test", 0)} <= set(written(event_file([epoch(0)], LANGUAGE)))
