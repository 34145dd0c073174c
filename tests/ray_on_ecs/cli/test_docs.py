"""The documents' commands of ray-on-ecs and their flags exist."""

import re
import subprocess
import sys
from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from ray_on_ecs.cli.main import COMMANDS, command_line
from ray_on_ecs.cluster import jobs
from ray_on_ecs.config import RunConfig
from tests.test_docs import DOCUMENTS, ROOT

README = (ROOT / "README.md").read_text()
CLI = (ROOT / "docs" / "cli.md").read_text()
FAULT_TOLERANCE = (ROOT / "docs" / "fault-tolerance.md").read_text()
# Pages with flags of a run, a recipe or another command of ray-on-ecs.
PAGES_OF_RUNS = (
    "checkpoints", "fault-tolerance", "model-sizes", "ray-programs", "recipes", "run-folder", "scripts",
    "troubleshooting",
)  # fmt: skip
# Prints the help of several programs.
HELP = """
import runpy, sys
from contextlib import suppress
for program in sys.argv[1:]:
    sys.argv = [program, "--help"]
    with suppress(SystemExit):
        runpy.run_path(program, run_name="__main__")
"""
OF_OTHER_TOOLS = {
    "--build",
    "--data-dir",
    "--editable",
    "--exclude",
    "--file",
    "--index-url",
    "--logdir",
    "--nproc-per-node",
    "--output",
    "--path",
    "--query",
    "--recursive",
    "--rm",
    "--script",
    "--secrets-provider",
    "--volumes",
}


def test_mentioned_flags_exist(known: str) -> None:
    text = README + "".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES_OF_RUNS)
    for flag in mentioned(text) - OF_OTHER_TOOLS - of_the_laptop():
        assert re.search(rf"{flag}\b", known), f"{flag} is not a flag of a command"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shown_commands_have_known_flags(document: str) -> None:
    """Flags of the lines that start with ray-on-ecs or its prompt, up to the script."""
    known = of_the_laptop()
    for line in re.findall(r"^(?:\$ )?ray-on-ecs (.*)", (ROOT / document).read_text(), flags=re.MULTILINE):
        assert line.split()[0] in COMMANDS, line
        assert mentioned(re.split(r"\.py\b|\$script|-m [\w.]+", line.partition("  #")[0])[0]) <= known, line


@pytest.fixture(scope="module")
def known() -> str:
    """The flags of a run and of the packaged jobs, whose process imports PyTorch once."""
    jobs = [str(ROOT / "training" / f"{name}.py") for name in ("image_classifier", "language_model", "ray_train_ddp")]
    of_jobs = subprocess.run([sys.executable, "-c", HELP, *jobs], text=True, capture_output=True, check=True).stdout
    return CliRunner().invoke(command_line, ["run", "--help"]).output + of_jobs


def test_flags_of_the_cli_page_exist(known: str) -> None:
    for flag in mentioned(CLI) - of_the_laptop() - OF_OTHER_TOOLS - {"--head", "--help"}:
        assert re.search(rf"{flag}\b", known), flag
    assert set(first_words(CLI)) == set(COMMANDS)


def mentioned(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def of_the_laptop() -> set[str]:
    """The flags of all verbs of ray-on-ecs."""
    context = click.Context(command_line)
    commands = [command_line.get_command(context, verb) for verb in COMMANDS]
    return {name for command in commands if command for param in command.params for name in param.opts}


def first_words(table: str) -> list[str]:
    return [each.split()[0] for each in re.findall(r"^\| `([^`]+)` \| [a-z]+s ", table, flags=re.MULTILINE)]


def test_documented_fault_tolerance_defaults_match_the_settings() -> None:
    rows = re.findall(r"^\| ((?:`--[a-z-]+`(?:, )?)+) \| (\S.*?) \|", FAULT_TOLERANCE, flags=re.MULTILINE)
    shown = {}
    for flags, defaults in rows:
        names = [name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", flags)]
        shown |= dict(zip(names, defaults.replace("`", "").split(", "), strict=True))
    settings = {**vars(RunConfig()), "max_resubmissions": jobs.DEFAULT_MAX_RESUBMISSIONS}
    for name, value in shown.items():
        assert str(settings[name]).removesuffix(".0") == value, f"{name} is not {value}"
    explained = {spec.name for spec in fields(RunConfig) if spec.metadata.get("section") == "Fault tolerance"}
    assert set() < explained <= set(shown)
