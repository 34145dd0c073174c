from collections.abc import Callable

import pytest
from torch import nn

from training.engine import optim
from training.engine.config import TrainingConfig

Config = Callable[..., TrainingConfig]


@pytest.mark.parametrize(("optimizer", "expected"), [("sgd", 0.4), ("adamw", 0.2)])
def test_the_learning_rate_follows_the_global_batch(config: Config, optimizer: str, expected: float) -> None:
    settings = config(optimizer=optimizer, lr=0.1)
    assert optim.peak_lr(settings, 256) == pytest.approx(0.1), "what --lr says is for 256 images a step"
    assert optim.peak_lr(settings, 1024) == pytest.approx(expected), "linear for SGD, the square root for AdamW"


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_schedule_rises_to_the_peak_and_ends_near_zero(config: Config, name: str) -> None:
    optimizer, schedule = optim.build(nn.Linear(2, 2), config(optimizer=name, lr=0.1), 256, 100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(0.1, rel=1e-3)
    assert rates.index(max(rates)) == pytest.approx(100 * optim.WARM_UP, abs=1)
    assert rates[0] < 0.01
    assert rates[-1] < 1e-4


def test_biases_and_norms_do_not_decay(config: Config) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    optimizer, _ = optim.build(model, config(weight_decay=0.1), 256, 10)
    decay = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    assert [decay[id(weight)] for weight in model.parameters()] == [0.1, 0.0, 0.0, 0.0]
