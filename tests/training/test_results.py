from typing import Any

import pytest
from rich.console import Console

from training import results
from training.recipes.language.recipe import LANGUAGE


def epoch(number: int, gpu_memory_bytes: int | None) -> dict[str, Any]:
    return {
        "epoch": number,
        "train_loss": 0.61234,
        "train_bits_per_byte": 0.81,
        "test_loss": 0.5,
        "test_bits_per_byte": 0.8345,
        "train_seconds": 123.4,
        "test_seconds": 3.0,
        "samples_per_second": 123_456.7,
        "step_seconds_median": 0.0123,
        "step_seconds_p95": 1.2345,
        "data_wait_fraction": 0.0123,
        "exposed_comm_fraction": 0.1,
        "gpu_memory_bytes": gpu_memory_bytes,
    }


def shown(gpu_memory_bytes: int | None) -> str:
    history = [epoch(0, gpu_memory_bytes), epoch(1, gpu_memory_bytes)]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(results.table({"run_name": "mine", "best": history[1]}, LANGUAGE, history))
    return captured.get()


@pytest.mark.parametrize("gpu_memory_bytes", [None, 3 * 2**29])
def test_the_table_fits_a_terminal_and_nothing_of_it_is_cut(gpu_memory_bytes: int | None) -> None:
    text = shown(gpu_memory_bytes)
    for value in ("0.6123", "0.8345", "126.4", "123,457", "12.3", "1,234", "1.2%", "10.0%", "samples/s"):
        assert value in text
    assert "…" not in text


def test_gpu_memory_is_shown_where_there_is_a_gpu() -> None:
    assert "1.50" in shown(3 * 2**29)
    assert "GiB" not in shown(None)
