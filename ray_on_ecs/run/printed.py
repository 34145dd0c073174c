"""Loss, step and epoch in a line of a script's output, as scripts and the common libraries print them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ray_on_ecs.rules import NUMBER
from ray_on_ecs.tracking.shown_log import COLOURS

# The search takes the square of the length.
LONGEST = 1000
WORD = r"(?<![\w/.-])"
# Of a name and its number: transformers 5 prints its numbers as strings, and NumPy 2 its types.
IS = r"['\"]?(?:\s*[:=]\s*|\s+)['\"]?(?:(?:tensor|np\.float\d+)\()?"
# `step 100 | loss 2.31`, `{'loss': '2.3', 'epoch': '0.5'}`, `loss train: 10.1`; but not the loss of a validation.
LOSS = re.compile(
    r"(?i)^(?:(?!\b(?:val|valid\w*|test\w*|eval\w*|dev)\b).)*?"
    rf"{WORD}(?:(?:train(?:ing)?|avg|mean|running|step|batch|total|lm)[_ /])?"
    rf"loss(?:[_ /](?:train|step|epoch)(?:[_/]total)?)?{IS}{NUMBER}(?![\w%])"
)
NUMBERED = r"(\d{1,15})(?![\w%]|[.,]\d)(?: {0,9}(?:/|of) {0,9}(\d{1,15})(?![\w%]|[.,]\d))?"
STEP = re.compile(rf"(?i){WORD}(?:train/)?(?:(?:global[_ ])?steps?|num_updates)(?:{IS}|\s*\[\s*){NUMBERED}")
ITERATION = re.compile(rf"(?i){WORD}iter(?:ation)?(?:{IS}|\[\s*|\(train\)\s+\[\s*){NUMBERED}")
EPOCH = re.compile(
    rf"(?i){WORD}epoch(?:\(train\))?['\"]?[\s:=#\[]*['\"]?(\d{{1,9}}(?:\.\d+)?)(?![\w%]|\.\d)"
    r"(?: {0,9}(?:/|of) {0,9}(\d{1,9})(?![\w%]|\.\d))?"
)
# tqdm's bar of a training, and Keras's: `Epoch 3:  40%|####  | 4/10 [00:01<00:02, 4.9it/s, loss=0.5]`.
TRAINING_BAR = re.compile(
    r"(?i)^\s*(?:(?:train|epoch|batch|iter|steps?\b)[^|]*?)?(?:[\d?]+%\s?\|[^|]*\|)?"
    r"\s*(\d+)/(\d+) \[(?![^\]]*(?:examples|B)/s)"
)
# torchtune's bar, the line of timm, torchvision and PyTorch's imagenet example, and the row of a table of ultralytics.
TUNE = re.compile(r"^\s*(\d+)\|(\d+)\|Loss: ")
OF_EPOCH = re.compile(r"^(?:Train: |Epoch: \[)(\d{1,9})\]? {0,4}\[ *(\d{1,9})/\d+[ \]]")
ROW = re.compile(r"^\s*(\d+)/\d+\s+[\d.]+[KMG]B?\s+(\d+(?:\.\d+)?(?:\s+\d+(?:\.\d+)?)*)")
TABLE_HEADER = re.compile(r"^\s*Epoch\s+GPU_mem\s+(\S.*)")
# The end of Hugging Face's Trainer, in its dictionary and in its table: the mean of the losses since the start.
MEAN = re.compile(r"\btrain_runtime\b|^\s*train_loss {2,}=")
# The results of a validation as indented JSON, and timm's at the end, which are those of its best epochs.
VALIDATION = re.compile(
    r"(?i)^\s*['\"]?(?:\w{1,30}[_/ ])?(?:val|valid\w*|test\w*|eval\w*|dev)(?:[_/ ][\w/ ]*\w)?['\"]?\s*[:=]\s*\{\s*$"
)
RESULTS = re.compile(r"^--result$")
# Of a line without a loss: a line that begins with it, and is not the title of a part, `Step 1: loading the data`.
BEGINS = re.compile(
    r"(?i)^(?:\[[^\[\]]*\] ?)*\W*(?:train\w*\W+)?(?:epoch|(?:step|iter|iteration)\W{0,3}\d+(?![\d:.)]*[:.)]\s+[a-z]))"
)


@dataclass(frozen=True)
class Printed:
    """Numbers of one line; None for each that it does not have."""

    loss: float | None = None  # of a training; it may not be finite
    step: int | None = None
    epoch: float | None = None
    total: int | None = None  # the steps of the epoch, or of the training
    epochs: int | None = None  # all of them
    is_bar: bool = False  # the step is that of a progress bar
    is_mean: bool = False  # the loss is the mean of the training, and not the last one


class PrintedNumbers:
    """Reader of one output, line by line; a table's header says what is in its rows, and a key what is in its block."""

    def __init__(self) -> None:
        self._columns: list[str] = []
        self._block: int | None = None  # the indentation of a validation's results, which are further right
        self._is_over = False

    def read(self, line: str) -> Printed:
        """Return the numbers of a line."""
        line = COLOURS.sub("", line)
        if len(line) > LONGEST or self._is_of_results(line):
            return Printed()
        if header := TABLE_HEADER.match(line):
            self._columns = header[1].split()
        if (row := ROW.match(line)) and self._columns:
            return Printed(self._loss_of(row[2].split()), None, float(row[1]))
        if tune := TUNE.match(line):
            loss = LOSS.search(line)
            return Printed(float(loss[1]) if loss else None, int(tune[2]), float(tune[1]), is_bar=True)
        loss = LOSS.search(line) if "loss" in line.lower() else None
        bar = TRAINING_BAR.match(line)
        if not (loss or bar or BEGINS.match(line)):
            return Printed()
        step, epoch = STEP.search(line) or ITERATION.search(line) or bar, EPOCH.search(line)
        if of_epoch := OF_EPOCH.match(line):
            step, epoch = None, None
        return Printed(
            loss=float(loss[1]) if loss else None,
            step=int(of_epoch[2]) if of_epoch else int(step[1]) if step else None,
            epoch=float(of_epoch[1]) if of_epoch else float(epoch[1]) if epoch else None,
            total=int(step[2]) if step and step[2] else None,
            epochs=int(epoch[2]) if epoch and epoch[2] else None,
            is_bar=bool(bar),
            is_mean=bool(loss and MEAN.search(line)),
        )

    def _is_of_results(self, line: str) -> bool:
        """Return whether a line is one of a validation, or of the results at the end."""
        depth = len(line) - len(line.lstrip())
        if self._block is not None and line and depth <= self._block:
            self._block = None
        if self._block is None and VALIDATION.match(line):
            self._block = depth
        trains = self._is_over and (OF_EPOCH.match(line) or TRAINING_BAR.match(line))
        self._is_over = bool(RESULTS.match(line)) or (self._is_over and not trains)
        return self._block is not None or self._is_over

    def _loss_of(self, values: list[str]) -> float | None:
        """Return the loss of a row, or the first of its losses."""
        named = dict(zip(self._columns, values, strict=False))
        losses = [value for name, value in named.items() if name.endswith("loss")]
        text = named.get("loss", losses[0] if losses else None)
        return None if text is None else float(text)
