"""Numbers in the output of common libraries: printed_lines.tsv has a line of each as that library prints it."""

from pathlib import Path

import pytest

from ray_on_ecs.run.printed import Printed, PrintedNumbers

TABLE = "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size"
LINES = Path(__file__).with_name("printed_lines.tsv").read_text().replace("\\e", "\x1b").splitlines()[1:]


@pytest.mark.parametrize(("loss", "step", "epoch", "line"), [line.split("\t", 3) for line in LINES])
def test_loss_step_and_epoch_of_a_line(loss: str, step: str, epoch: str, line: str) -> None:
    numbers = PrintedNumbers()
    assert numbers.read(TABLE) == Printed()
    numbers_read = numbers.read(line)
    shown = [
        "-" if value is None else f"{value:g}" for value in (numbers_read.loss, numbers_read.step, numbers_read.epoch)
    ]
    assert shown == [loss, step, epoch]


def test_a_row_without_a_table_is_not_read() -> None:
    row = "        1/3      0.52G      1.135      2.898      1.401         15        640: 100%"
    assert PrintedNumbers().read(row) == Printed()
    numbers = PrintedNumbers()
    numbers.read("      Epoch    GPU_mem       loss  Instances       Size")
    assert numbers.read(row) == Printed(loss=1.135, epoch=1.0)


def test_a_long_line_is_not_read() -> None:
    assert PrintedNumbers().read(f"step 1 loss: 0.5{' ' * 1000}") == Printed()
