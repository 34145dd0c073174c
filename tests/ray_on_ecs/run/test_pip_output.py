"""The reason of a failed installation, from outputs of pip 26."""

import pytest

from ray_on_ecs.run.pip_output import reason_of


def of_build(*said: str, end: str = "ERROR: Failed to build 'file:///work/mylib' when getting requirements") -> str:
    block = "\n".join(f"      {line}" for line in said)
    return f"""\
Processing ./mylib
  Getting requirements to build wheel: started
  error: subprocess-exited-with-error

  \u00d7 Getting requirements to build wheel did not run successfully.
  │ exit code: 1
  ╰─> [{len(said)} lines of output]
{block}
      [end of output]

  note: This error originates from a subprocess, and is likely not a problem with pip.
{end}
"""


OF_METADATA = """\
error: metadata-generation-failed

\u00d7 Encountered error while generating package metadata.
╰─> from file:///work/mylib

note: This is an issue with the package mentioned above, not pip.
hint: See above for details."""
OF_WHEEL = """\
  ERROR: Failed building wheel for mylib
Failed to build mylib
error: failed-wheel-build-for-install

\u00d7 Failed to build installable wheels for some pyproject.toml based projects
╰─> mylib"""
CLONE = """\
  Running command git clone --quiet https://github.com/a/b /tmp/x
  {}
  error: subprocess-exited-with-error

  \u00d7 git clone --quiet https://github.com/a/b /tmp/x did not run successfully.
  │ exit code: 128
  ╰─> No available output.

  note: This error originates from a subprocess, and is likely not a problem with pip.
ERROR: Failed to build 'git+https://github.com/a/b' when git clone --quiet https://github.com/a/b /tmp/x
"""
NONE = """\
ERROR: Could not find a version that satisfies the requirement foo (from versions: none)
ERROR: No matching distribution found for foo
"""
CUDA = "RuntimeError: CUDA_HOME is not set"
OUTPUTS = {
    "a build": (of_build("Traceback (most recent call last):", CUDA), f"mylib can't be built: {CUDA}"),
    "metadata": (of_build(CUDA, end=OF_METADATA), f"mylib can't be built: {CUDA}"),
    "a build's own words": (
        of_build("running egg_info", "Cargo, the Rust package manager, is not on PATH.", "Checking for Rust...."),
        "mylib can't be built: Cargo, the Rust package manager, is not on PATH.",
    ),
    "the name of a package": (
        of_build("Install cython first", end=OF_METADATA.replace("from file:///work/mylib", "pycocotools")),
        "pycocotools can't be built: Install cython first",
    ),
    "a missing header": (
        of_build(
            "running build_ext",
            "a.cpp:1:10: fatal error: cuda.h: No such file or directory",
            "compilation terminated.",
            "error: command '/usr/bin/g++' failed with exit code 1",
            end=OF_WHEEL,
        ),
        "mylib can't be built: a.cpp:1:10: fatal error: cuda.h: No such file or directory",
    ),
    "torch's extension": (
        of_build("b.cu(3): error: identifier is undefined", "RuntimeError: Error compiling objects for extension"),
        "mylib can't be built: b.cu(3): error: identifier is undefined",
    ),
    "no compiler": (
        of_build("error: command 'g++' failed: No such file or directory"),
        "mylib can't be built: error: command 'g++' failed: No such file or directory",
    ),
    "a program that fails": (
        of_build("subprocess.CalledProcessError: Command '['nvcc']' returned non-zero exit status 1."),
        "mylib can't be built: subprocess.CalledProcessError: Command '['nvcc']' returned non-zero exit status 1.",
    ),
    "an isolated build": (
        of_build("ModuleNotFoundError: No module named 'torch'"),
        "mylib can't be built: ModuleNotFoundError: No module named 'torch'; its build must see the installed "
        "packages: --env PIP_NO_BUILD_ISOLATION=0",
    ),
    "a build's requirement": (
        of_build(*NONE.splitlines(), end="ERROR: Failed to build 'file:///work/mylib' when installing dependencies"),
        "mylib can't be built: No matching distribution found for foo",
    ),
    "a build within a build": (
        of_build(*of_build(CUDA).splitlines(), end="ERROR: Failed to build 'mylib' when installing build dependencies"),
        f"mylib can't be built: {CUDA}",
    ),
    "a backend": (
        "error: backend-unavailable\n\n\u00d7 Cannot import build backend 'x'.\n"
        f"╰─> ModuleNotFoundError: No module named 'x'\n{OF_METADATA}",
        "mylib can't be built: ModuleNotFoundError: No module named 'x'",
    ),
    "a repository": (
        CLONE.format("fatal: repository 'https://github.com/a/b/' not found"),
        "git+https://github.com/a/b can't be built: fatal: repository 'https://github.com/a/b/' not found",
    ),
    "a private repository": (
        CLONE.format("fatal: could not read Username for 'https://github.com': No such device or address"),
        "git+https://github.com/a/b can't be built: fatal: could not read Username for 'https://github.com': No such "
        "device or address; give a token: git+https://${TOKEN}@host/x and --secret TOKEN",
    ),
    "no git": (
        "ERROR: Cannot find command 'git' - do you have 'git' installed and in your PATH?",
        "Cannot find command 'git' - do you have 'git' installed and in your PATH?; git is not installed here: install "
        "it, or name a release of the package",
    ),
    "a conflict": (
        "ERROR: Cannot install a because these package versions have conflicting dependencies.\n\n"
        "The conflict is caused by:\n    The user requested b==1.0\n    a 1.0 depends on b>=2\n\nTo fix this you could "
        "try to:\n1. loosen the range\n\nERROR: ResolutionImpossible: for help visit https://pip.pypa.io",
        "The user requested b==1.0; a 1.0 depends on b>=2",
    ),
    "hashes": (
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package "
        "versions, please update the hashes. Otherwise, examine the package contents carefully.\n    b==1.0 from x:\n"
        "        Expected sha256 0\n             Got        1\n",
        "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE; b==1.0 from x:; Expected sha256 0; Got "
        "       1",
    ),
    "no such version": (
        "ERROR: Could not find a version that satisfies the requirement b==9 (from versions: 0.1, 0.2, 1.0, 1.1rc1)\n"
        "ERROR: No matching distribution found for b==9",
        "Could not find a version that satisfies the requirement b==9 (the newest are 0.2, 1.0, 1.1rc1); No matching "
        "distribution found for b==9",
    ),
    "another Python": (
        "ERROR: Package 'b' requires a different Python: 3.11.7 not in '>=3.13'",
        "Package 'b' requires a different Python: 3.11.7 not in '>=3.13'",
    ),
    "a full disk": (
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
        "Could not install packages due to an OSError: [Errno 28] No space left on device; free some space on this "
        "disk",
    ),
    "no answer": (
        "error: connection-failed\n\n\u00d7 Failed to connect to a.b while fetching https://a.b/x.tar.gz\n"
        "╰─> [Errno 111] Connection refused\n\nhint: Are you connected to the Internet?",
        "Failed to connect to a.b while fetching https://a.b/x.tar.gz: [Errno 111] Connection refused",
    ),
    "a fault of pip": ("ERROR: Exception:\nTraceback (most recent call last):\n  File x\na.B: c", "a.B: c"),
    "a requirement": (
        "ERROR: Invalid requirement: 'foo bar': Expected end\n    foo bar\n        ^ (from line 1 of r.txt)",
        "Invalid requirement: 'foo bar': Expected end (from line 1 of r.txt)",
    ),
    "a wrong operator": (
        "ERROR: Invalid requirement: 'a=1.0': Expected end\n    a=1.0\n    ~^ (from line 1 of r.txt)\n"
        "Hint: = is not a valid operator. Did you mean == ?",
        "Invalid requirement: 'a=1.0': Expected end (from line 1 of r.txt); Hint: = is not a valid operator. Did you "
        "mean == ?",
    ),
    "a wrong marker": (
        "ERROR: Invalid requirement: 'a': Expected a marker variable or quoted string\n    python < \"3\"\n    ^\n",
        "Invalid requirement: 'a': Expected a marker variable or quoted string",
    ),
    "nothing": ("", "it wrote nothing"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_reason_is_the_error_and_its_way_out(kind: str) -> None:
    output, reason = OUTPUTS[kind]
    assert reason_of([line.rstrip() for line in output.splitlines()]) == reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "  Could not fetch URL http://a.b/foo/: 401 Client Error: Unauthorized for url: http://a.b/foo/ - skipping",
            "http://a.b/foo/: 401 Client Error: Unauthorized for url: http://a.b/foo/; give its password: "
            "https://user:${TOKEN}@host/simple/ and --secret TOKEN",
        ),
        (
            "Could not fetch URL https://a.b/foo/: connection error: Failed to resolve IP address - skipping",
            "https://a.b/foo/: connection error: Failed to resolve IP address",
        ),
        (
            "  Skipping link: none of the wheel's tags (cp39-cp39-win_amd64) are compatible: https://a.b/foo.whl",
            "none of the wheel's tags (cp39-cp39-win_amd64) are compatible: https://a.b/foo.whl",
        ),
        (
            "WARNING: The repository located at a.b is not a trusted or secure host and is being ignored.",
            "The repository located at a.b is not a trusted or secure host",
        ),
    ],
)
def test_index_or_file_that_is_passed_over_is_named(line: str, reason: str) -> None:
    details = [line, "  Skipping link: wrong project name (not foo): file:///wheels/bar.whl"]
    assert reason_of(NONE.splitlines(), details) == f"No matching distribution found for foo; {reason}"
