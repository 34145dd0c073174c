"""Steps of a training, and all of them, in the lines and progress bars of common loops and libraries."""

import pytest

from ray_on_ecs.run.metrics import MetricsLog
from ray_on_ecs.run.printed import PrintedNumbers
from ray_on_ecs.run.printed_steps import PrintedSteps
from ray_on_ecs.tracking.end import Steps


def bar(step: int, total: int, name: str = "") -> str:
    return f"\r{name}{100 * step // total:3d}%|{'#' * (10 * step // total)}| {step}/{total} [00:01<00:09,  5.1it/s]"


def bars(*steps: int, total: int = 400, name: str = "") -> list[str]:
    return [bar(step, total, name) for step in steps]


def nested(outer: str = "", inner: str = "", *, epochs: int = 3) -> list[str]:
    """A bar of epochs and one of batches below it, up to the middle of the third epoch."""
    lines = bars(0, total=10, name=outer)
    for epoch in range(1, epochs + 1):
        lines += bars(0, 20, *[40] * (epoch < epochs), total=40, name=inner)
        lines += bars(*[epoch] * (epoch < epochs), total=10, name=outer)
    return lines


EPOCHS = [line for epoch in (1, 2) for line in bars(0, 50, 100, total=100, name=f"Epoch {epoch}/10: ")]
# An epoch of a training and of its validation, whose bars have the same name.
PAIRS = [["Epoch 1/10", *bars(0, 100, total=100)], bars(0, 20, total=20), ["Epoch 2/10", *bars(0, 1, total=100)]]
TRAINED, VALIDATED, NEXT = PAIRS
LAST = [*bars(0, 100, total=100), "Epoch 10/10", *bars(0, 100, total=100)]
KERAS = "1875/1875 [==============================] - 3s 1ms/step - loss: 0.45"
CASES = {
    "a bar of the training": (bars(0, 20, 325), (325, 400)),
    "Hugging Face": ([*bars(0, 20), "{'loss': '5.8', 'grad_norm': '1.4', 'epoch': '0.27'}", *bars(21)], (21, 400)),
    "Hugging Face with a validation": ([*bars(0, 100), *bars(0, 25, 50, total=50), *bars(101)], (101, 400)),
    "Hugging Face in a validation": ([*bars(0, 100), *bars(0, 25, total=50)], (100, 400)),
    "Hugging Face with a validation before": ([*bars(0), *bars(0, 50, total=50), *bars(1, 2, 3)], (3, 400)),
    "Hugging Face resumed": (bars(0, 250, 251), (251, 400)),
    "a bar for each epoch": ([*bars(0, 200, 400), *bars(0, 5)], (5, None)),
    "a bar for each epoch that is cut off": ([*bars(0, 20), *bars(0, 5)], (5, None)),
    "bars of epochs that are numbered": ([*EPOCHS, bar(30, 100, "Epoch 3/10: ")], (230, 1000)),
    "bars of epochs from 0": (bars(0, 30, total=100, name="Epoch 0/9: "), (30, 900)),
    "the last of epochs from 0": ([*bars(0, name="Epoch 0/2: "), bar(100, 400, "Epoch 2/2: ")], (900, 1200)),
    "bars of epochs without their number": (bars(0, 30, total=100, name="Epoch 3: "), (30, None)),
    "a header before each bar": (["Epoch 1/5", *bars(0, 400), "Epoch 2/5", *bars(0, 100)], (500, 2000)),
    "a validation within a header's epoch": ([*TRAINED, *bars(0, 10, total=20)], (100, 1000)),
    "a validation after a header's epoch": ([*TRAINED, *VALIDATED], (100, 1000)),
    "the epoch after a validation": ([*TRAINED, *VALIDATED, *NEXT], (101, 1000)),
    "a header before its bar": ([*TRAINED, *VALIDATED, "Epoch 2/10"], (100, 1000)),
    "an epoch's end with its header again": ([*TRAINED, "Epoch 1/10 loss 0.5", *VALIDATED], (100, 1000)),
    "a validation after the last epoch": ([*TRAINED, *VALIDATED, *LAST, *VALIDATED], (1000, 1000)),
    "a validation as long as an epoch": ([*TRAINED, *bars(0, 50, total=100)], (100, 1000)),
    "two validations": ([*TRAINED, *VALIDATED, *bars(0, 5, total=50), *VALIDATED, *NEXT], (101, 1000)),
    "a validation of an epoch that is cut off": (["Epoch 1/10", *bars(0, 50, total=100), *VALIDATED], (50, 1000)),
    "a longer epoch after a validation": ([*TRAINED, *VALIDATED, "Epoch 2/10", *bars(0, 60, total=120)], (180, 1200)),
    "lines of a validation": (
        ["Epoch 1/5 step 100/100 loss 2.5", "Epoch 1/5 step 10/20 loss 2.5", "Epoch 2/5 step 1/100 loss 2.5"],
        (101, 500),
    ),
    "a validation in lines": (["Epoch 1/5 step 100/100 loss 2.5", "Epoch 1/5 step 10/20 loss 2.5"], (100, 500)),
    "a bar of a validation with its epoch": ([*EPOCHS, *bars(0, 10, total=20, name="Epoch 2/10 valid: ")], (200, 1000)),
    "trainings one after the other": ([*TRAINED, *LAST, "Epoch 1/10", *bars(0, 7, total=100)], (7, 1000)),
    "Keras": (["Epoch 1/5", KERAS, "Epoch 2/5", KERAS.replace("1875/", " 125/")], (2000, 9375)),
    "Lightning": ([bar(4, 10, "Epoch 3: "), "Validation DataLoader 0:  50%|#####     | 1/2 [00:00<00:00]"], (4, None)),
    "nested bars in the first epoch": (nested(epochs=1), (20, 400)),
    "nested bars between two epochs": ([*nested(epochs=1), *bars(40, total=40), *bars(1, total=10)], (40, 400)),
    "nested bars in the third epoch": (nested(), (100, 400)),
    "nested bars with a validation": ([*nested(), *bars(40, total=40), *bars(0, 5, total=20)], (120, 400)),
    "nested bars with names": (nested("Epochs: ", "Training: "), (100, 400)),
    "nested bars of epochs and batches": (nested("Epochs: ", "batches: "), (100, 400)),
    "a bar of epochs and another one": (nested("Epochs: ", "saved: "), (2, 10)),
    "two counts one after the other": ([*bars(0, 50, total=50), *bars(0, 20)], (20, None)),
    "a named validation after an epoch": ([*bars(0, 400), *bars(0, 9, total=50, name="Validating: ")], (400, 400)),
    "a bar in a validation alone": (["step 100 loss 2.5", *bars(0, 25, total=50)], None),
    "a bar before steps beyond it": ([*bars(0, 50, total=50), "step 51 loss 2.5", *bars(0, 25, total=40)], None),
    "steps in a bar": ([*bars(0, 20), "step 20 loss 2.5", *bars(21)], (21, 400)),
    "steps of all epochs after each": ([*EPOCHS, "Epoch 2/10 step 200 loss 2.5"], (200, 1000)),
    "a slower rank in the same output": (bars(0, 1, 0, 2, 1, 30, 28), (30, 400)),
    "lines of steps": (["step 00100/21400 (0.47%) | loss: 5.1", "step 00101/21400 (0.47%) | loss: 5.0"], (101, 21400)),
    "steps of a number": (["Step 5 of 100 loss 0.5"], (5, 100)),
    "Megatron": ([" iteration       10/     100 | consumed samples:          160 | lm loss: 1.0E+01 |"], (10, 100)),
    "mmengine": (["07/01 10:00:00 - mmengine - INFO - Iter(train) [  50/1000]  lr: 1.0e-02  loss: 2.3"], (50, 1000)),
    "lines of epochs and steps": (["Epoch [1/5], Step [100/600], Loss: 0.1", "Epoch [2/5], Step [1/600]"], (601, 3000)),
    "ignite": (["Epoch[1] Iteration[100/938] Loss: 0.5"], (100, None)),
    "diffusers": (["Steps:  12%|#         | 120/1000 [01:00<08:00,  1.8it/s, step_loss=0.123]"], (120, 1000)),
    "torchtune": (["1|50|Loss: 1.234:  10%|#         | 50/500 [00:10<01:30,  5.00it/s]"], None),
    "timm": (["Train: 0 [  50/1251 (  4%)]  Loss: 6.95 (6.93)"], None),
    "steps without a total": (["step 100: train loss 2.1"], None),
    "samples": (["Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.2"], None),
    "a download": ([bar(2, 5, "Downloading: "), " 12%|# | 120/1000 [00:01, 80.0MB/s]"], None),
    "a total of 0": ([" 0/0 [00:00<?, ?it/s]"], None),
    "epochs alone": (["Epoch 1/5", "Epoch 2/5"], None),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_and_total_of_an_output(name: str) -> None:
    lines, expected = CASES[name]
    numbers, steps = PrintedNumbers(), PrintedSteps()
    for line in lines:
        steps.read(line, numbers.read(line))
    assert steps.steps == (expected and Steps(*expected))


def test_printed_steps_count_until_the_script_reports() -> None:
    log = MetricsLog({"loss": "loss: ([0-9.]+)"})
    log.read_line("step 100/1000 loss: 0.5")
    assert log.steps == Steps(100, 1000)
    log.take_report({"step": 3})
    log.read_line("step 200/1000 loss: 0.5")
    assert log.steps == Steps(3)
    log.restart()
    assert log.steps is None


def test_bar_that_has_begun_again_has_no_total_after_a_restart() -> None:
    log = MetricsLog({})
    for line in bars(0, 20, 400, 0, 5):
        log.read_line(line)
    log.restart()
    assert log.steps is None
    for line in bars(0, 7):
        log.read_line(line)
    assert log.steps == Steps(7)
    log.restart()
    for line in ["Epoch 1/5", *bars(0, 7)]:
        log.read_line(line)
    assert log.steps == Steps(7, 2000)
