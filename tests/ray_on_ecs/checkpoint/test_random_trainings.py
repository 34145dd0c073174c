"""Trainings of random parts, killed at random steps: resumed in new objects, they end with the undisturbed bits.

A failure names its seed; `Training(seed, …)` has the same parts and steps again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ray_on_ecs import Checkpointer, saved_progress
from ray_on_ecs.checkpoint.index import Progress
from tests.ray_on_ecs.checkpoint.loop import difference

WIDTH, STEPS, EPOCH = 3, 9, 3
SEEDS_OF_A_BLOCK = 10
BLOCKS = int(os.environ.get("TRAININGS", "50")) // SEEDS_OF_A_BLOCK  # more of them every night


class Killed(Exception):
    """The process ends."""


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Growing(nn.Module):
    """Buffers that grow, appear, disappear and change their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(0, WIDTH))
        self.register_buffer("first", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.history = torch.cat([self.history, x.detach()[:1]])
            self.count = (self.count + 1).to(torch.float64 if len(self.history) > 4 else torch.int32)
            if len(self.history) == 2:
                self.first = None
            if len(self.history) == 3:
                self.register_buffer("later", x.detach().mean(0))
        return x + self.history.mean(0).tanh() + float(self.count) / 10 * getattr(self, "later", torch.zeros(1)).tanh()


class Extra(nn.Module):
    """An extra state of growing values: a tensor, or a dictionary with lists, texts and new keys."""

    def __init__(self, is_tensor: bool) -> None:
        super().__init__()
        self.is_tensor = is_tensor
        self.seen: list[float] = []

    def get_extra_state(self) -> Any:
        if self.is_tensor:
            return torch.tensor(self.seen)
        return {
            "seen": self.seen,
            "text": "x" * len(self.seen),
            **{f"key {number}": 1 for number in range(len(self.seen))},
        }

    def set_extra_state(self, state: Any) -> None:
        self.seen = (state if self.is_tensor else torch.tensor(state["seen"])).tolist()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(float(x.detach().sum().tanh()))
        return x + sum(self.seen) / 10


class Teacher(nn.Module):
    """A layer without gradients that follows another one."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        filled(self.teacher)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.data.lerp_(other.data, 0.3)
        return self.student(x) + self.teacher(x)


class Unused(nn.Module):
    """A parameter without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Shared(torch.optim.Optimizer):
    """State that is not a parameter's, and values of all kinds beside the tensors."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "notes": ["a"], "table": torch.ones(2)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # ty: ignore[incompatible-method-override]
        states: Any = self.state
        shared = states["all"]
        shared["count"] = shared.get("count", 0) + 1
        shared.setdefault("mean", torch.ones(1, dtype=torch.float64)).mul_(0.9)
        states[("a", 1)] = {"steps": list(range(shared["count"]))}
        together = None
        for group in self.param_groups:
            group["notes"] = group["notes"] + ["b"]
            group["table"] = group["table"] * 1.1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                together = state.setdefault("together", torch.zeros(1) if together is None else together)
                together += 1
                state.setdefault("a.b", torch.zeros_like(parameter)).add_(parameter.grad)
                state.setdefault("list", []).append(parameter.grad.sum())
                state["nested"] = {"double": parameter.grad.double() / 3, 1: (1, "text")}
                state["name"], state["array"] = f"step {shared['count']}", np.arange(shared["count"])
                state[7] = state.get(7, 0) + 1
                by = group["lr"] * float(shared["mean"]) * float(state["nested"]["double"].sum()) / 10
                parameter.sub_(by * state["a.b"].tanh() * len(state["name"]) / (1 + float(together)))


class Lookahead(torch.optim.Optimizer):
    """A wrapper with a state_dict of its own form."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.steps = base, 0
        self.slow = [parameter.detach().clone() for group in base.param_groups for parameter in group["params"]]
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.slow, self.steps = state_dict["slow"], state_dict["steps"]
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # ty: ignore[incompatible-method-override]
        self.base.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, parameter in zip(
                self.slow, (p for group in self.param_groups for p in group["params"]), strict=True
            ):
                parameter.copy_(slow.lerp_(parameter, 0.5))


def filled(module: nn.Module) -> nn.Module:
    """Give a module the weights that the script loads at each start."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.LayerNorm(WIDTH)),
    "tied": Tied,
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "growing": Growing,
    "extra": lambda: Extra(False),
    "extra tensor": lambda: Extra(True),
    "lazy": lambda: nn.LazyLinear(WIDTH),
    "teacher": Teacher,
    "unused": Unused,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.1, centered=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "LBFGS": lambda p: torch.optim.LBFGS([parameter for group in p for parameter in group["params"]], 0.01, max_iter=2),
    "shared": Shared,
    "lookahead": lambda p: Lookahead(torch.optim.AdamW(p, 0.01)),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


class Training:
    """A training whose parts, steps and interruptions follow from a seed; a new object is a new process."""

    def __init__(self, seed: int, folder: Path | None) -> None:
        choose = random.Random(seed)
        progress = saved_progress(folder) if folder else Progress()
        torch.manual_seed(seed + 1000 * progress.step)  # what is resumed must not depend on its first weights
        random.seed(progress.step)
        self.step = 0
        names = [choose.choice(list(PARTS)) for _ in range(choose.randint(1, 4))]
        parts = [PARTS[name]() for name in names]
        self.base = filled(nn.Linear(WIDTH, WIDTH))
        self.model = nn.Sequential(self.base, *parts, nn.Linear(WIDTH, 1))
        self.unfreezes = choose.choice(["never", "flag", "group", "flips", "freezes"])
        self.at = choose.randint(1, STEPS - 2)
        self.freeze()
        if "lazy" in names:
            if progress.step % 2:
                self.model.eval()(torch.ones(1, WIDTH))
            self.model.train()
        trained = [parameter for part in self.model[1:] for parameter in part.parameters()]
        if self.unfreezes != "group":
            trained += self.base.parameters()
        half = len(trained) // 2 if choose.random() < 0.5 else 0
        groups = [{"params": trained[half:]}, *([{"params": trained[:half], "weight_decay": 0.1}] if half else [])]
        kinds = [name for name in OPTIMIZERS if self.unfreezes != "group" or name not in ("LBFGS", "lookahead")]
        if "lazy" in names:
            kinds = ["SGD", "momentum", "Adam", "RMSprop"]
        self.kind = choose.choice(kinds)
        self.optimizer: Any = OPTIMIZERS[self.kind](groups)
        self.state: dict[str, Any] = {}
        if choose.random() < 0.5 and self.unfreezes != "group" and self.kind not in ("lookahead", "shared"):
            self.state["schedule"] = SCHEDULES[choose.choice(list(SCHEDULES))](self.optimizer)
        if choose.random() < 0.4 and "lazy" not in names and "growing" not in names:
            self.state["average"] = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=False)
        if choose.random() < 0.3 and self.kind != "LBFGS":
            self.state["scaler"] = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        self.saves_frozen = choose.random() < 0.5
        self.interruptions = sorted(choose.sample(range(1, STEPS), choose.randint(1, 3)))
        self.saves = [step for step in range(1, STEPS + 1) if choose.random() < 0.5]
        self.loses_the_newest = choose.random() < 0.3
        self.description = (
            f"{names}, {self.kind}, {self.unfreezes} at {self.at}, {list(self.state)}, {self.saves_frozen}"
        )
        if self.unfreezes == "group" and progress.step > self.at:
            self.add_group()

    def freeze(self) -> None:
        is_trained = {
            "never": False,
            "flag": self.step >= self.at,
            "group": self.step >= self.at,
            "flips": self.step == self.at,
            "freezes": self.step < self.at,
        }
        self.base.requires_grad_(is_trained[self.unfreezes])

    def add_group(self) -> None:
        self.optimizer.add_param_group({"params": list(self.base.parameters()), "lr": 0.005})

    def train_step(self) -> None:
        self.freeze()
        if self.unfreezes == "group" and self.step == self.at:
            self.add_group()
        x = torch.randn(4, WIDTH) + random.random()
        scaler = self.state.get("scaler")
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        elif self.kind == "LBFGS":
            self.optimizer.step(lambda: loss)
        else:
            self.optimizer.step()
        if schedule := self.state.get("schedule"):
            schedule.step(*([loss.detach()] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        if average := self.state.get("average"):
            average.update_parameters(self.model)
        self.step += 1

    def train(self, folder: Path, start: int) -> None:
        """Train with checkpoints until the next interruption, or to the end."""
        options: dict[str, Any] = {"state": self.state, "save_frozen": self.saves_frozen, "every_seconds": None}
        with Checkpointer(folder, model=self.model, optimizer=self.optimizer, **options) as checkpoint:
            checkpoint.resume()
            self.step = checkpoint.step
            ends = [*self.interruptions, STEPS + 1][start]
            while self.step < STEPS:
                self.train_step()
                checkpoint.after_step()
                if self.step in self.saves:
                    checkpoint.save()
                if self.step == ends:
                    raise Killed

    def result(self) -> dict[str, Any]:
        for group in self.optimizer.param_groups:
            group.pop("differentiable", None)  # which Adafactor adds to its defaults when it loads a state
        others = {name: value.state_dict() for name, value in self.state.items()}
        random_states = {"torch": torch.get_rng_state(), "python": random.getstate()}
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **others, **random_states}


def check(seed: int, folder: Path) -> None:
    whole = Training(seed, None)
    while whole.step < STEPS:
        whole.train_step()
    expected = whole.result()
    for start in range(len(whole.interruptions) + 1):
        training = Training(seed, folder)
        try:
            training.train(folder, start)
        except Killed:
            saved = sorted(folder.glob("step-*"))
            if training.loses_the_newest and saved:
                (saved[-1] / "checkpoint.json").unlink()
    if fault := difference(expected, training.result()):
        raise AssertionError(fault)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_interrupted_training_of_any_parts_ends_with_the_same_bits(
    tmp_path: Path, block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(block * SEEDS_OF_A_BLOCK, (block + 1) * SEEDS_OF_A_BLOCK):
        try:
            check(seed, tmp_path / str(seed))
        except BaseException as cause:
            errors = capsys.readouterr().err
            raise AssertionError(f"seed {seed}: {Training(seed, None).description} {errors}") from cause
