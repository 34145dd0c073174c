"""Progress bars in the output of a script, as tqdm and others write them."""

import os
import sys
from pathlib import Path

import pytest

from ray_on_ecs.run.bars import MOST, Bars
from ray_on_ecs.run.process import ProcessOptions, ScriptProcess

# Writes as tqdm does.
HEAD = """
import os, sys
class tqdm:
    def __init__(self, items=None, total=None, desc="", position=0, leave=True):
        self.items, self.total = items, total or (len(items) if hasattr(items, "__len__") else None)
        self.desc, self.position, self.leave, self.n = desc and desc + ": ", position, leave, 0
        self.draw()
    def out(self, text):
        sys.stderr.write("\\n" * self.position + text + "\\x1b[A" * self.position)
    def draw(self):
        shown = f"{self.n}it [00:00, ?it/s]" if not self.n else f"{self.n}it [00:00, {9.9 * self.n}it/s]"
        if self.total:
            shown = f"{100 * self.n // self.total:3d}%|{'#' * self.n}| {self.n}/{self.total} [00:00<00:01, 9.9it/s]"
        self.out(f"\\r{self.desc}{shown}")
    def update(self):
        self.n += 1
        self.draw()
    def __iter__(self):
        tqdm.bar = self
        for item in self.items:
            yield item
            self.update()
        self.out("") if not self.leave else sys.stderr.write("\\n")
        if not self.leave: self.out("\\r" + " " * 60 + "\\r")
    @classmethod
    def write(cls, text):
        cls.bar.out("\\r" + " " * 60 + "\\r")
        sys.stdout.write(text + "\\n")
        cls.bar.draw()
fast = tqdm
"""
SCRIPTS = {
    "a bar": ("for i in fast(range(50)): pass\nprint('done')", ["100%", "done"]),
    "with lines": (
        "for i in fast(range(50)):\n  if i % 10 == 9: tqdm.write(f'loss {i}')",
        ["loss 9", "loss 19", "loss 29", "loss 39", "loss 49", "100%"],
    ),
    "one below the other": (
        "for i in fast(range(3), desc='outer'):\n"
        "  for j in fast(range(20), desc='inner', position=1, leave=False): pass\nprint('done')",
        ["outer", "done", "inner"],
    ),
    "one after the other": (
        "for name in 'ab':\n  for i in fast(range(20), desc=name): pass",
        ["a: 100%", "b: 100%"],
    ),
    "that is left": ("bar = fast(total=50)\nfor i in range(20): bar.update()\nos._exit(0)", [" 40%"]),
    "with prints": (
        "for i in fast(range(3)): print(f'loss [{i}]', flush=True)",
        ["0%|| 0/3 [00:00<00:01, 9.9it/s]loss [0]", "33%|#| 1/3 ", "66%|##| 2/3 ", "100%"],
    ),
    "without a total": ("for i in fast(iter(range(50))): pass\nprint('done')", ["50it", "done"]),
    "of its own": (
        "for i in range(50): print(f'\\rstep {i}', end='', flush=True)\nprint()\nprint('done')",
        ["step 49", "done"],
    ),
    "with its return at the end": (
        "for i in range(50): print(f'step {i}', end='\\r', flush=True)\nprint('done')",
        ["done", "step 49"],
    ),
    "not there": (
        "print('a\\r')\nprint()\nsys.stdout.write('b\\r\\r\\n')\nprint(' 50% | 3/4')\nprint('')\nprint('c')",
        ["a", "", "b", " 50% | 3/4", "", "c"],
    ),
}


def test_texts_that_differ_are_not_all_kept() -> None:
    bars = Bars(lambda: 0.0)
    assert not [text for number in range(1000) if (text := bars.take(f"file-{chr(0x4E00 + number)}"))]
    assert len(bars.rest()) <= MOST


@pytest.mark.parametrize("name", SCRIPTS)
def test_last_state_of_a_bar_is_shown_once(tmp_path: Path, name: str) -> None:
    script, expected = SCRIPTS[name]
    lines: list[str] = []
    states: list[str] = []
    argv = [sys.executable, "-u", "-c", f"{HEAD}{script}"]
    options = ProcessOptions(os.environ, tmp_path, lines.append, on_state=states.append)
    with ScriptProcess(argv, options) as process:
        assert process.wait(60) == 0
        kept = list(process.last_lines)
    shown = [line.removesuffix("\n") for line in lines]
    assert len(shown) == len(expected), shown
    assert all(line.strip().startswith(start.strip()) for start, line in zip(expected, shown, strict=True)), shown
    assert len(states) >= len(lines)
    assert set(kept) <= set(lines)
