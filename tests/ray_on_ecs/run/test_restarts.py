"""Lines of restarts, and scripts that begin again."""

import json
from datetime import UTC, datetime

import pytest

from ray_on_ecs.run.extent import Extent
from ray_on_ecs.run.files.newest import Kept
from ray_on_ecs.run.metrics import MetricsLog
from ray_on_ecs.run.restarts import Restarts
from tests.log_lines import collect_lines

AT = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
FILE = Kept("out/last.ckpt", AT, AT)
CHECKPOINT = Kept("checkpoints/step-000000020", AT, AT, is_loaded=True)


def extent(*lines: str) -> Extent:
    """The extent of a start that prints these lines."""
    log = MetricsLog({})
    for line in lines:
        log.read_line(line)
    return log.extent


def make_restarts(kept: Kept | None = FILE, resume_args: str | None = None) -> Restarts:
    restarts = Restarts(resume_args, [], [])
    restarts.kept, restarts.is_known = kept, True
    return restarts


@pytest.mark.parametrize(
    ("kept", "resume_args", "message"),
    [
        (None, None, "restarting from the beginning (failure 1)"),
        (None, "--resume x", "restarting from the beginning (failure 1)"),
        (CHECKPOINT, None, "restarting from checkpoints/step-000000020 of 2026-11-28 12:00:00 UTC (failure 1)"),
        (
            FILE,
            None,
            "restarting; whether it continues is up to the script "
            "(newest kept file: out/last.ckpt of 2026-11-28 12:00:00 UTC; failure 1)",
        ),
        (
            FILE,
            "--resume out/last.ckpt",
            "restarting with --resume out/last.ckpt "
            "(newest kept file: out/last.ckpt of 2026-11-28 12:00:00 UTC; failure 1)",
        ),
    ],
)
def test_line_names_only_what_is_known(kept: Kept | None, resume_args: str | None, message: str) -> None:
    restarts, lines = make_restarts(kept, resume_args), collect_lines()
    restarts.note("training failed", "failure 1")
    assert lines == [f"training failed; {message}"]


@pytest.mark.parametrize("dropped", ["", "last.pt"])
def test_script_may_continue_by_a_text_file(dropped: str) -> None:
    restarts, lines = make_restarts(None), collect_lines()
    restarts.has_files, restarts.dropped = True, dropped
    restarts.note("training failed", "failure 1")
    why = ", as last.pt had just changed and may be half-written" if dropped else ""
    how = "restarting; whether it continues is up to the script"
    assert lines == [f"training failed; {how} (kept: only text and settings{why}; failure 1)"]


def test_each_restart_is_recorded() -> None:
    records: list = []
    restarts = Restarts(None, records, [])
    restarts.note("nodes are being reclaimed", "")
    restarts.kept, restarts.is_known = FILE, True
    restarts.note("training failed", "failure 1")
    assert [(record["cause"], record["kept"]) for record in records] == [
        ("nodes are being reclaimed", None),
        ("training failed", "out/last.ckpt"),
    ]


HF = [f"{{'loss': '2.1', 'grad_norm': '1', 'epoch': '{epoch / 100}'}}" for epoch in range(27, 240, 27)]
STEPS = [f"step {step} | loss 2.1" for step in range(3, 216, 3)]
EPOCHS = [f"epoch {number}" for number in range(5)]
BAR = [f" 10%|#    | {step}/400 [00:01<00:09, 5.1it/s]" for step in range(300)]
# Of TRL: the first bars come before an epoch is known.
BARS_AND_EPOCHS = [
    line for at in range(5) for line in (f"{at:3}%|  | {at * 5}/50 [00:01<00:09, 5.1it/s]", *(HF[at - 1 : at]))
]
TIMM = [f"Train: {epoch} [{step:4}/15 ({step:3}%)]  Loss: 1.02 (1.12)" for epoch in range(2) for step in range(15)]
IMAGENET = [f"Epoch: [{epoch}][{step:3}/15]\tLoss 1.02 (1.12)" for epoch in range(2) for step in range(15)]
STEPS_OF_EPOCHS = [f"epoch {epoch} step {step} loss 1" for epoch in range(3) for step in range(0, 50, 10)]
STEPS_ONLY = [f"step {step} loss 1" for _ in range(3) for step in range(0, 50, 10)]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (HF, HF[:2], "epoch 0.27 (before: 2.16)"),
        (STEPS, STEPS[:2], "step 3 (before: 213)"),
        (EPOCHS, EPOCHS[:2], "epoch 0 (before: 4)"),
        (BAR, BAR[:2], "step 0 (before: 299)"),
        (STEPS_OF_EPOCHS, STEPS_OF_EPOCHS[:2], "epoch 0 (before: 2)"),
        (STEPS_OF_EPOCHS[:4], STEPS_OF_EPOCHS[:2], "step 0 (before: 30)"),
        (BARS_AND_EPOCHS, BARS_AND_EPOCHS[:3], ""),
        (BARS_AND_EPOCHS[:-1], BARS_AND_EPOCHS[:3], "step 0 (before: 20)"),
        ([BAR[0], *HF], [BAR[0], *HF[:2]], "epoch 0.27 (before: 2.16)"),
        ([*BAR[:2], *HF], BAR[:2], ""),
        (TIMM, TIMM[:2], "epoch 0 (before: 1)"),
        (IMAGENET, IMAGENET[:2], "epoch 0 (before: 1)"),
        (IMAGENET[:9], IMAGENET[:2], "step 0 (before: 8)"),
        (TIMM, TIMM[15:], None),
        (HF, HF[5:], None),
        (STEPS, STEPS[30:], None),
        (STEPS, STEPS[1:], None),  # its last checkpoint was an early one
        (EPOCHS, EPOCHS[:1], None),  # `epoch 0` may stand in the settings that it prints
        (EPOCHS, ["epoch 0", "epoch 4"], None),
        (EPOCHS[:2], EPOCHS, None),  # it had not got further
        (BAR, ["  0%|     | 0/400 [00:00<?, ?it/s]", *BAR[200:]], None),  # transformers' bar jumps to its step
        (STEPS_OF_EPOCHS, STEPS_OF_EPOCHS[5:], None),
        (STEPS_ONLY, STEPS_ONLY, None),  # the steps of which epoch, is not known
        (STEPS, ["loading", "step 1: load the data", "step 2: build the model"], None),
        (STEPS, [], None),
        ([], STEPS, None),
    ],
)
def test_script_that_begins_again_is_said_once(before: list[str], after: list[str], message: str | None) -> None:
    restarts, lines = make_restarts(), collect_lines()
    restarts.begin()
    restarts.look(extent(*before))
    restarts.begin()
    for number in range(len(after) + 1):
        restarts.look(extent(*after[:number]))
    at = f" at {message}" if message else ""
    began = f"the script began again{at}: it did not load out/last.ckpt; --resume-args, or docs/fault"
    assert [line[: len(began)] for line in lines] == [began] * (message is not None)


@pytest.mark.parametrize(("kept", "message"), [(FILE, "step 3 (before: 213)"), (None, "")])
def test_repeated_command_that_begins_again_is_said(kept: Kept | None, message: str) -> None:
    extents: list = []
    commands = (STEPS[:20], STEPS[10:]), (STEPS[:2], STEPS[:3]), (STEPS[:2],)
    lines = collect_lines()
    for starts in commands:
        restarts = Restarts(None, [], extents)
        restarts.kept, restarts.is_known = kept, True
        for steps in starts:
            restarts.begin()
            for number in range(len(steps) + 1):
                restarts.look(extent(*steps[:number]))
        extents[:] = json.loads(json.dumps(extents))
    befores = [line.partition("before: ")[2].partition(")")[0] for line in lines]
    assert befores == (["213", "9"] if kept else [])
    assert not kept or message in lines[0]


def test_command_that_has_loaded_its_file_twice_did_not_begin_again() -> None:
    """It was stopped, or its script failed, before it stored another one."""
    extents: list = []
    lines = collect_lines()
    for starts in ((STEPS[:20],), (STEPS[15:30], STEPS[15:25]), (STEPS[15:20],)):
        restarts = Restarts(None, [], extents)
        restarts.kept, restarts.is_known = FILE, True
        for steps in starts:
            restarts.begin()
            for number in range(len(steps) + 1):
                restarts.look(extent(*steps[:number]))
    assert lines == []


@pytest.mark.parametrize("extents", [[], [{}], [None, None], [{"first": 1}] * 2, [5, "x"]])
def test_extents_of_another_version_say_nothing(extents: list) -> None:
    restarts, lines = Restarts(None, [], extents), collect_lines()
    restarts.kept, restarts.is_known = FILE, True
    restarts.begin()
    restarts.look(extent(*STEPS[:3]))
    assert lines == []


def test_dropped_file_is_named_once() -> None:
    restarts, lines = make_restarts(None), collect_lines()
    restarts.dropped = "last.pt"
    for _ in range(2):
        restarts.note("training failed", "")
        restarts.begin()
    why = ", as last.pt had just changed and may be half-written"
    assert lines == [f"training failed; restarting from the beginning{text}" for text in (why, "")]


def test_a_third_start_is_compared_with_the_furthest() -> None:
    restarts, lines = make_restarts(), collect_lines()
    for steps in (STEPS, STEPS[:10], STEPS[:2]):
        restarts.begin()
        restarts.look(extent(*steps))
    assert ["before: 213" in line for line in lines] == [True, True]


def test_without_files_it_is_known_to_begin_again() -> None:
    restarts, lines = make_restarts(None), collect_lines()
    for steps in (STEPS, STEPS):
        restarts.begin()
        restarts.look(extent(*steps))
    assert lines == []


def test_reported_steps_count_instead_of_printed_ones() -> None:
    log = MetricsLog({})
    log.read_line("epoch 7")
    for step in (10, 20, 20, 30):
        log.take_report({"step": step})
    log.read_line("epoch 8")
    assert log.extent.is_reported
    assert (log.extent.first, log.extent.second, log.extent.last) == ((-1.0, 10), (-1.0, 20), (-1.0, 30))
