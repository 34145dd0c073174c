"""Hugging Face's Trainer at a notice: the checkpoint that is made then is complete, stays, and is resumed from."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_on_ecs import sdk
from tests.lazy import Lazy

transformers = Lazy("transformers")
hugging_face = Lazy("ray_on_ecs.hugging_face")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]  # it takes long to import
DATA = [{"x": torch.tensor([i / 12]), "labels": torch.tensor([2.0 * i / 12])} for i in range(12)]
STEPS = 18  # three epochs


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


def trainer(folder: Path, notice_at: int | None, **options: Any) -> Any:
    """Return a Trainer whose node gets a notice before a step."""

    class Notice(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step + 1 == notice_at:
                (folder / "sdk" / sdk.DEADLINE).write_text(str(time.time() + 100))

    fixed: dict[str, Any] = {"disable_tqdm": True, "report_to": [], "use_cpu": True, "seed": 3, "logging_steps": 100}
    arguments = transformers.TrainingArguments(
        str(folder / "out"), per_device_train_batch_size=2, num_train_epochs=3, learning_rate=0.05, **fixed, **options
    )
    callback = hugging_face.SaveBeforeReclaim()
    callback._reclaim._pace.is_due = lambda: True  # at each step
    return transformers.Trainer(Net(), arguments, train_dataset=DATA, eval_dataset=DATA, callbacks=[Notice(), callback])


def saved(folder: Path) -> set[str]:
    return {path.name for path in (folder / "out").glob("checkpoint-*")}


EACH_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch"}
EACH_TWO_STEPS = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}


@pytest.mark.parametrize("notice_at", [4, STEPS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**EACH_EPOCH, **BEST, "save_total_limit": 1},
        {**EACH_EPOCH, **BEST, "greater_is_better": True, "save_total_limit": 1},
        {**EACH_TWO_STEPS, **BEST, "greater_is_better": True, "save_total_limit": 1},
        {**EACH_EPOCH, **BEST, "save_total_limit": 2},
        {**EACH_EPOCH, **BEST, "save_strategy": "best", "save_total_limit": 1},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "defaults",
)
def test_checkpoint_of_a_notice_is_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], notice_at: int
) -> None:
    (tmp_path / "sdk").mkdir()
    monkeypatch.setenv(sdk.FOLDER_VARIABLE, str(tmp_path / "sdk"))
    with pytest.raises(SystemExit) as end:
        trainer(tmp_path, notice_at, **options).train()
    assert end.value.code == 0
    newest = tmp_path / "out" / f"checkpoint-{notice_at}"
    assert transformers.trainer_utils.get_last_checkpoint(str(tmp_path / "out")) == str(newest)
    assert {"trainer_state.json", "optimizer.pt"} <= {path.name for path in newest.iterdir()}
    (tmp_path / "sdk" / sdk.DEADLINE).unlink()
    second = trainer(tmp_path, None, **options)
    second.train(resume_from_checkpoint=str(newest))
    assert second.state.global_step == STEPS
