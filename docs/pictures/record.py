"""Recording of a killed worker: a real run's lines at their times, as an animated SVG.

python docs/pictures/record.py writes recovery.svg beside it: it trains examples/ddp_checkpointer.py on two processes,
sends SIGKILL to one in the middle, and draws the lines of the command. It needs Linux and an installed ray-on-ecs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import textwrap
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

import psutil

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "examples" / "ddp_checkpointer.py"
COMMAND = ("ray-on-ecs", "run", "--local", "--num-workers", "2", "--run-name", "first", SCRIPT.name, "--epochs", "200")
KILLED_AFTER = "epoch 100:"
SHOWN_EPOCHS = 20  # each such number of epochs has a line
EPOCH = re.compile(r"\[rank 0\] epoch (\d+): ")
TRACEBACK = "Traceback (most recent call last):"

COLUMNS, LINE_HEIGHT, LEFT, TOP = 104, 18, 62, 58  # characters; pixels
PLAYED_SECONDS, HELD_SECONDS = 14, 6
STYLE = """
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d7dae0;white-space:pre}
.time,.note{fill:#8b93a3}.typed{fill:#7fd1a0}.kill{fill:#ff8f80}.back{fill:#ffd479}
@media (prefers-reduced-motion:reduce){g{animation:none!important}}
"""


@dataclass(frozen=True)
class Line:
    """A line of the recording, `seconds` after the command's start."""

    seconds: float
    text: str
    style: str = ""


def record(folder: Path) -> list[Line]:
    """Train in a folder, kill rank 1 once, and return the lines."""
    (folder / SCRIPT.name).write_text(SCRIPT.read_text())
    began = time.monotonic()
    lines = [Line(0, "$ " + " ".join(COMMAND), "typed")]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        COMMAND, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as command:
        assert command.stdout is not None
        for text in command.stdout:
            if text.startswith("[rank 0] [rank0]: ") and "Traceback" not in text:
                continue  # how rank 0, too, noticed the loss
            if (epoch := EPOCH.match(text)) and int(epoch[1]) % SHOWN_EPOCHS:
                continue
            short = text.rstrip().replace(str(folder), "…").replace(TRACEBACK, "Traceback: …")
            style = "back" if short.startswith("ray-on-ecs: ") or "resuming" in short else ""
            lines.append(Line(time.monotonic() - began, short, style))
            if KILLED_AFTER in text and not any(line.style == "kill" for line in lines):
                process = worker(rank=1, folder=folder)
                process.send_signal(signal.SIGKILL)
                lines.append(Line(time.monotonic() - began, f"$ kill -9 {process.pid}    # another terminal", "kill"))
    if command.returncode:
        raise SystemExit("\n".join([*(line.text for line in lines), f"exit status {command.returncode}"]))
    return lines


def worker(rank: int, folder: Path) -> psutil.Process:
    """Return the process of a rank that trains in the folder."""
    for process in psutil.process_iter():
        try:
            arguments, environment = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        is_script = arguments[1:3] == ["-u", SCRIPT.name]
        if is_script and environment.get("RANK") == str(rank) and environment["RUN_URI"].startswith(str(folder)):
            return process
    raise SystemExit(f"rank {rank} of {SCRIPT.name} is not running")


def draw(lines: list[Line]) -> str:
    """Return the SVG. Each line appears at its time; without animation all are there."""
    seconds = lines[-1].seconds
    rows = [
        Line(line.seconds, part, line.style)
        for line in lines
        for part in textwrap.wrap(line.text, COLUMNS, subsequent_indent="    ", break_on_hyphens=False) or [""]
    ]
    factor = max(1, round(seconds / PLAYED_SECONDS))
    length = seconds / factor + HELD_SECONDS
    height = TOP + LINE_HEIGHT * len(rows)
    width = LEFT + 8 * COLUMNS
    title = f"Two processes train, one is killed, the run continues: {seconds:.0f} s, played {factor} times faster"
    title += f", with each {SHOWN_EPOCHS}th epoch"
    style, body, shown = STYLE, [], -1.0
    for number, row in enumerate(rows):
        share = 100 * row.seconds / factor / length
        if number:
            style += f"@keyframes l{number}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}\n"
            style += f"#l{number}{{animation:l{number} {length:.2f}s infinite}}\n"
        y = TOP + LINE_HEIGHT * number
        clock = f"{int(row.seconds // 60)}:{int(row.seconds % 60):02d}" if row.seconds != shown else ""
        shown = row.seconds
        body.append(
            f'<g id="l{number}"><text class="time" x="16" y="{y}">{clock}</text>'
            f'<text class="{row.style}" x="{LEFT}" y="{y}">{escape(row.text)}</text></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>{title}</title><style>{style}</style>'
        f'<rect width="100%" height="100%" rx="8" fill="#1d2027"/>'
        f'<text class="note" x="16" y="26">{title}</text>' + "\n".join(body) + "</svg>\n"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        (HERE / "recovery.svg").write_text(draw(record(Path(name).resolve())))
