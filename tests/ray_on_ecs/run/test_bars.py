"""Progress bars in the output of a script, as tqdm and others write them."""

import os
import sys
from pathlib import Path

import pytest

from ray_on_ecs.run.process import ProcessOptions, ScriptProcess

HEAD = "import sys, time\nfrom tqdm import tqdm\ndef fast(*a, **k): return tqdm(*a, mininterval=0, miniters=1, **k)\n"
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
        "print('a\\r')\nprint()\nsys.stdout.write('b\\r\\n')\nprint(' 50% | 3/4')\nprint('')\nprint('c')",
        ["a", "", "b", " 50% | 3/4", "", "c"],
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_last_state_of_a_bar_is_shown_once(tmp_path: Path, name: str) -> None:
    script, expected = SCRIPTS[name]
    lines: list[str] = []
    states: list[str] = []
    argv = [sys.executable, "-u", "-c", f"import os\n{HEAD}{script}"]
    options = ProcessOptions(os.environ, tmp_path, lines.append, on_state=states.append)
    with ScriptProcess(argv, options) as process:
        assert process.wait(60) == 0
        kept = list(process.last_lines)
    shown = [line.removesuffix("\n") for line in lines]
    assert len(shown) == len(expected), shown
    assert all(line.strip().startswith(start.strip()) for start, line in zip(expected, shown, strict=True)), shown
    assert len(states) >= len(lines)
    assert set(kept) <= set(lines)
