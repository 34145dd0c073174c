"""State of a training: what a checkpoint holds and leaves out, and what a resume refuses in one line."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, SequentialLR, StepLR

from ray_on_ecs import Checkpointer, saved_progress
from ray_on_ecs.checkpoint.background import DivergedError
from ray_on_ecs.checkpoint.checkpointer import ResumeError
from tests.ray_on_ecs.checkpoint.loop import difference
from tests.training.ranks import Ranks


def make_model(trains_base: bool = False, weight: float = 1.0) -> nn.Sequential:
    """Return a model of a base, which the script loads, and a head."""
    base, head = nn.Linear(2, 2), nn.Linear(2, 1)
    nn.init.constant_(base.weight, weight)
    nn.init.zeros_(base.bias)
    return nn.Sequential(base.requires_grad_(trains_base), head)


def weight_of(model: nn.Sequential) -> Tensor:
    """Return the weight of the base."""
    return cast(Tensor, model[0].weight)


def saved(folder: Path, model: nn.Module, change: Callable[[], Any] = lambda: None, **options: Any) -> Checkpointer:
    """Save a training at its start, and again after a change and a step."""
    checkpoint = Checkpointer(folder, model=model, **options)
    checkpoint.save()
    change()
    checkpoint.after_step()
    checkpoint.close()
    return checkpoint


def refused(folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """Return the line with which a checkpoint is refused."""
    with pytest.raises(ResumeError) as error:
        Checkpointer(folder, **options).resume()
    assert error.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def change_data(model: nn.Sequential) -> None:
    weight_of(model).data.add_(1)


def flip(model: nn.Sequential) -> None:
    base = model[0].requires_grad_(True)
    torch.optim.SGD(base.parameters(), 0.1).zero_grad()
    base(torch.ones(2)).sum().backward()
    torch.optim.SGD(base.parameters(), 0.1).step()
    base.requires_grad_(False)


def replace(model: nn.Sequential) -> None:
    model[0] = make_model(weight=5.0)[0]


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "unfrozen": lambda model: (model[0].requires_grad_(True), change_data(model)),
    "trained and frozen again": flip,
    "moved without gradients": change_data,
    "averaged": lambda model: weight_of(model).data.lerp_(torch.zeros(2, 2), 0.1),
    "loaded": lambda model: model[0].load_state_dict(nn.Linear(2, 2).state_dict()),
    "replaced": replace,
    "assigned": lambda model: setattr(model[0].weight, "data", torch.full((2, 2), 3.0)),
    "in another dtype": lambda model: model.double(),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changed_frozen_weights_are_saved(tmp_path: Path, kind: str) -> None:
    model = make_model()
    saved(tmp_path, model, lambda: CHANGES[kind](model), save_frozen=False)
    for _ in range(2):  # also by the next process
        again = make_model()
        checkpoint = Checkpointer(tmp_path, model=again, save_frozen=False)
        assert checkpoint.resume()
        assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
        checkpoint.after_step()
        checkpoint.close()


@pytest.mark.parametrize("trains", [False, True])
def test_frozen_weights_left_out_are_the_scripts(tmp_path: Path, trains: bool) -> None:
    saved(tmp_path, make_model(), save_frozen=False)
    again = make_model(trains, 2.0)
    assert Checkpointer(tmp_path, model=again, save_frozen=False).resume()
    assert weight_of(again).eq(2).all()
    with pytest.raises(ResumeError, match=r"0\.weight is .* it is missing"):
        Checkpointer(tmp_path, model=again).resume()


def test_weights_loaded_before_resume_are_left_out(tmp_path: Path) -> None:
    model = make_model()
    checkpoint = Checkpointer(tmp_path, model=model, save_frozen=False)
    change_data(model)
    checkpoint.resume()
    checkpoint.after_step()
    checkpoint.close()
    again = make_model(weight=7.0)
    assert Checkpointer(tmp_path, model=again, save_frozen=False).resume()
    assert weight_of(again).eq(7).all()


def test_averaged_weights_are_saved_with_the_frozen_ones(tmp_path: Path) -> None:
    average = make_model(weight=3.0).requires_grad_(False)
    saved(tmp_path, make_model(), state={"average": average}, save_frozen=False)
    again = make_model(weight=4.0).requires_grad_(False)
    assert Checkpointer(tmp_path, model=make_model(), state={"average": again}, save_frozen=False).resume()
    assert weight_of(again).eq(3).all()


@pytest.mark.parametrize("keep_last", [1, 3])
@pytest.mark.parametrize("kind", CHANGES)
def test_best_checkpoint_counts_from_the_unfreezing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, keep_last: int
) -> None:
    """An earlier one lacks the weights of then, which the script has trained since."""
    model = make_model()
    checkpoint = Checkpointer(tmp_path, model=model, save_frozen=False, keep_best="loss", keep_last=keep_last)
    best: dict[str, torch.Tensor] = {}
    for loss in (0.1, 0.2, 0.5, 0.3, 0.4):
        checkpoint.after_step()
        if loss == 0.5:
            CHANGES[kind](model)
        cast(Tensor, model[1].bias).data.add_(1)
        checkpoint.end_epoch(loss=loss)
        if loss == 0.3:
            best = {name: value.clone() for name, value in model.state_dict().items()}
        assert checkpoint.wait()
    assert capsys.readouterr().out.count("is no longer the best checkpoint") == 1
    assert checkpoint.load_best()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in best.items())


def test_best_checkpoint_below_adapters_is_of_all_steps(tmp_path: Path) -> None:
    model = make_model()
    checkpoint = Checkpointer(tmp_path, model=model, save_frozen=False, keep_best="loss", keep_last=1)
    for loss in (0.1, 0.2, 0.3):
        checkpoint.after_step()
        cast(Tensor, model[1].bias).data.fill_(loss)
        checkpoint.end_epoch(loss=loss)
    assert checkpoint.load_best()
    assert cast(Tensor, model[1].bias).eq(0.1).all()


def test_progress_is_known_before_the_model(tmp_path: Path) -> None:
    assert saved_progress(tmp_path) == (0, 0)
    checkpoint = Checkpointer(tmp_path, model=make_model())
    for _ in range(3):
        checkpoint.after_step()
    checkpoint.end_epoch()
    checkpoint.close()
    assert saved_progress(tmp_path) == (3, 1)


def optimizer_of(model: nn.Sequential, *groups: list[int]) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": [parameters[number] for number in group]} for group in groups])


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ([[2, 3]], "parameter group 1 differs: only the checkpoint has model.0.weight, model.0.bias there"),
        ([[2], [0, 1]], "parameter group 0 differs: only the checkpoint has model.1.bias there"),
        ([[2, 3], [0], [1]], "parameter group 1 differs: only the checkpoint has model.0.bias there"),
        ([[0, 1], [2, 3]], "only the checkpoint has model.1.weight, model.1.bias there, only this script has model.0."),
        ([[3, 2], [0, 1]], "parameter group 0 differs: its parameters have another order"),
    ],
)
def test_other_parameter_groups_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], groups: list[list[int]], named: str
) -> None:
    model = make_model(True)
    saved(tmp_path, model, optimizer=optimizer_of(model, [2, 3], [0, 1]))
    model = make_model(True)
    line = refused(tmp_path, capsys, model=model, optimizer=optimizer_of(model, *groups))
    assert named in line
    assert "saved_progress()" in line


class Free(torch.optim.Optimizer):
    """An optimizer whose state a test sets."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


STATES: dict[str, Any] = {
    "a text": {"all": 1},
    "a tuple": {("a", 1): [1, "b"]},
    "a large number": {1000: {"count": 1}},
    "None": {None: torch.ones(1, dtype=torch.float64)},
    "a value of a parameter": {0: {"a.b": torch.ones(2), 3: torch.ones(1), "": torch.zeros(()), "text": "warm"}},
    "nested": {0: {"x": {"y": [torch.ones(1, dtype=torch.float64), (1, "z", None)]}, "flag": True}},
    "no dictionary": {0: torch.ones(3), 1: [1, "a"]},
    "of another dtype than the parameter": {0: {"master": torch.full((2, 2), 1 / 3, dtype=torch.float64)}},
}


@pytest.mark.parametrize("kind", STATES)
def test_any_state_of_an_optimizer_is_kept(tmp_path: Path, kind: str) -> None:
    def build() -> tuple[nn.Sequential, Free]:
        model = make_model(True)
        return model, Free(model.parameters())

    model, optimizer = build()
    for key, value in STATES[kind].items():
        optimizer.state[list(model.parameters())[key] if key in (0, 1) else key] = value
    saved(tmp_path, model, optimizer=optimizer)
    model, again = build()
    assert Checkpointer(tmp_path, model=model, optimizer=again).resume()
    assert difference(again.state_dict(), optimizer.state_dict()) is None


def stray(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[torch.ones(3)] = {}


def numbered(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[1] = "x"  # ty: ignore[invalid-assignment]


def replaced(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[1] = nn.Linear(2, 1)


def of_a_class(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["hook"] = Path("a")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (stray, r"optimizer: its state has an entry of a tensor of shape \(3,\) that is in none of its parameter gr"),
        (numbered, r"optimizer\.state\[1\]: PyTorch's state_dict takes this number for a parameter"),
        (replaced, r"optimizer: a parameter of shape \(1, 2\) belongs neither .* of the module that replaced it"),
        (of_a_class, r"optimizer\.groups\.0\.hook: a value of class pathlib"),
    ],
)
def test_state_that_pytorch_loses_is_refused_at_the_save(tmp_path: Path, change: Any, named: str) -> None:
    model = make_model(True)
    optimizer = Free(model.parameters())
    checkpoint = Checkpointer(tmp_path, model=model, optimizer=optimizer)
    change(model, optimizer)
    with pytest.raises(ValueError, match=named) as error:
        checkpoint.save()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b.c", "a.b")])
def test_names_whose_keys_could_be_equal_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="and a dot; take another name"):
        Checkpointer(tmp_path, model=make_model(), state={name: nn.Linear(1, 1) for name in names})


class Buffered(nn.Module):
    """A module with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(2))


def with_new_buffer(module: nn.Module) -> None:
    module.register_buffer("new", torch.ones(3))


BUFFERS: dict[str, Callable[[Any], Any]] = {
    "longer": lambda module: setattr(module, "own", torch.ones(5)),
    "shorter": lambda module: setattr(module, "own", torch.ones(0)),
    "of another dimension": lambda module: setattr(module, "own", torch.ones(2, 2)),
    "of another dtype": lambda module: setattr(module, "own", torch.ones(2, dtype=torch.int64)),
    "resized in place": lambda module: module.own.resize_(7).fill_(1),
    "new": with_new_buffer,
    "gone": lambda module: setattr(module, "own", None),
    "deleted": lambda module: delattr(module, "own"),
}


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", BUFFERS)
def test_buffer_of_another_form_is_restored(tmp_path: Path, kind: str, is_nested: bool) -> None:
    def build() -> tuple[nn.Module, nn.Module]:
        buffered = Buffered()
        return nn.ModuleDict({"a": nn.Sequential(buffered)}) if is_nested else buffered, buffered

    model, buffered = build()
    saved(tmp_path, model, lambda: BUFFERS[kind](buffered))
    for _ in range(2):
        again, _ = build()
        checkpoint = Checkpointer(tmp_path, model=again)
        assert checkpoint.resume()
        assert repr(again.state_dict()) == repr(model.state_dict())
        checkpoint.after_step()
        checkpoint.close()


def test_lazy_module_without_values_is_refused_at_the_save(tmp_path: Path) -> None:
    model = nn.LazyLinear(2)
    checkpoint = Checkpointer(tmp_path, model=model)
    checkpoint.resume()
    with pytest.raises(ValueError, match=r"model\.weight has no values yet; call the module once before the first"):
        checkpoint.save()
    model(torch.ones(1, 3))
    checkpoint.save()
    checkpoint.close()
    again = nn.LazyLinear(2)
    assert Checkpointer(tmp_path, model=again).resume()
    assert torch.equal(again.weight, model.weight)


class Refusing:
    """An object that refuses its state."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error:
            raise self.error


class RefusingModule(nn.Module):
    """A metric, which is a module."""

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        raise IndexError("3")


def scaler(is_on: bool) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", enabled=is_on)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        (scaler(False), scaler(True), "state.own.load_state_dict: RuntimeError: The source state dict is empty"),
        (Refusing(), Refusing(KeyError("epoch")), "state.own.load_state_dict: KeyError: 'epoch'"),
        (Refusing(), Refusing(AssertionError("two\nlines")), "state.own.load_state_dict: AssertionError: two lines"),
        (Refusing(), Refusing(TypeError("a")), "state.own.load_state_dict: TypeError: a"),
        (Refusing(), scaler(True), "state.own was of class Refusing, and is of class GradScaler now"),
        (RefusingModule(), RefusingModule(), "state.own.load_state_dict: IndexError: 3"),
    ],
    ids=["scaler", "KeyError", "AssertionError", "TypeError", "class", "module"],
)
def test_object_that_refuses_its_state_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: Any, now: Any, named: str
) -> None:
    saved(tmp_path, make_model(), state={"own": before})
    assert named in refused(tmp_path, capsys, model=make_model(), state={"own": now})


def test_schedule_of_another_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def build(make: Any) -> dict[str, Any]:
        model = make_model(True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return {"model": model, "optimizer": optimizer, "state": {"schedule": make(optimizer)}}

    def several(optimizer: Any) -> Any:
        return SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], [1])

    saved(tmp_path, **build(lambda optimizer: StepLR(optimizer, 1)))
    for make, name in ((lambda o: CosineAnnealingLR(o, 2), "CosineAnnealingLR"), (several, "SequentialLR")):
        line = refused(tmp_path, capsys, **build(make))
        assert f"state.schedule was of class StepLR, and is of class {name} now" in line


def test_storage_that_fails_in_a_load_is_no_mismatch(tmp_path: Path) -> None:
    saved(tmp_path, make_model(), state={"own": Refusing()})
    with pytest.raises(ConnectionError):
        Checkpointer(tmp_path, model=make_model(), state={"own": Refusing(ConnectionError("reset"))}).resume()


def end(rank: int, ranks: int, folder: Path, how: str) -> list[str]:
    """Train two steps, destroy the process group, and end in one of several ways; returns the folders."""
    model = nn.parallel.DistributedDataParallel(make_model(True))
    checkpoint = Checkpointer(folder / how, model=model)
    checkpoint.resume()
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        checkpoint.after_step()
    if how == "saving":
        checkpoint.save()
    if how != "rank 0 alone" or rank == 0:
        dist.destroy_process_group()
    if how == "failing":
        with pytest.raises(ZeroDivisionError), checkpoint:
            raise ZeroDivisionError
    elif how == "with":
        with checkpoint:
            pass
    else:
        checkpoint.close(export=folder / how / "model.safetensors")
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder / how}.new", rank=rank, world_size=ranks)
    return sorted(path.parent.name for path in (folder / how).glob("*/checkpoint.json"))


@pytest.mark.parametrize("how", ["close", "with", "saving", "failing", "rank 0 alone"])
def test_process_group_may_be_destroyed_before_close(on_ranks: Ranks, tmp_path: Path, how: str) -> None:
    expected = [] if how == "failing" else ["step-000000002"]
    assert on_ranks(2, end, tmp_path, how)[0] == expected
    assert (tmp_path / how / "model.safetensors").exists() == (how not in ("with", "failing"))


def teach(rank: int, ranks: int, folder: Path) -> Tensor:
    """Train a model under FSDP2 with a frozen part whose shard changes on one rank alone; returns it resumed."""
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Module:
        model = make_model()
        fully_shard(model)
        return model

    model = build()
    shard: Any = model[0].weight  # ty: ignore[not-subscriptable]
    saved(folder, model, lambda: rank == 1 and shard.to_local().data.add_(1), save_frozen=False)
    again = build()
    Checkpointer(folder, model=again, save_frozen=False).resume()
    return again.state_dict()["0.weight"].full_tensor()


def test_frozen_part_that_changes_on_one_rank_is_saved(on_ranks: Ranks, tmp_path: Path) -> None:
    for weight in on_ranks(2, teach, tmp_path):
        assert weight.tolist() == [[1, 1], [2, 2]]


def test_trusted_value_whose_class_has_gone_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Refusing()
    monkeypatch.setattr(own, "state_dict", lambda: {"value": Refusing()})
    saved(tmp_path, make_model(), state={"own": own}, trust_pickle=True)
    monkeypatch.undo()
    monkeypatch.delattr(f"{__name__}.Refusing")
    line = refused(tmp_path, capsys, model=make_model(), state={"own": own}, trust_pickle=True)
    assert re.search(r"a value can't be read: AttributeError: .*Refusing", line)


def of_type(dtype: torch.dtype, value: float) -> nn.Linear:
    """Return a layer whose weights are of a type, as those of a quantized base are."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.full((2, 2), value).to(dtype), requires_grad=False)
    return layer


FLOATS = [each for each in vars(torch).values() if isinstance(each, torch.dtype) and each.is_floating_point]
COMPLEX = [torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", [*dict.fromkeys(FLOATS), *COMPLEX], ids=str)
def test_weights_of_each_type_are_saved_if_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    if "float4" in str(dtype):  # without numbers that are not finite, and without a conversion
        whole = nn.Linear(2, 2, bias=False)
        whole.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.uint8).view(dtype), requires_grad=False)
    else:
        whole = of_type(dtype, 1.0)
        with pytest.raises(DivergedError):
            Checkpointer(tmp_path, model=of_type(dtype, math.nan)).save()
    saved(tmp_path, whole)
    assert Checkpointer(tmp_path, model=whole).resume()


class Opaque(Tensor):
    """Weights of a class that can't tell, as some quantized ones."""

    def isfinite(self) -> Any:
        raise NotImplementedError


def test_frozen_weights_left_out_need_not_be_finite(tmp_path: Path) -> None:
    model = make_model()
    model[0].weight = nn.Parameter(torch.full((2, 2), math.nan).as_subclass(Opaque), requires_grad=False)
    saved(tmp_path, model, save_frozen=False)
