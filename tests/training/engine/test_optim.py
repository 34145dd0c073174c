from torch import nn

from training.engine import optim
from training.engine.config import TrainingConfig


def test_biases_and_norms_do_not_decay() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    optimizer = optim.build_optimizer(model, TrainingConfig(weight_decay=0.1), (0.9, 0.95))
    decay = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    assert [decay[id(weight)] for weight in model.parameters()] == [0.1, 0.0, 0.0, 0.0]
