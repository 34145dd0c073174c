"""The documents' commands, outputs, flags and paths exist."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest
import yaml

from ray_on_ecs.cli.main import COMMANDS, command_line
from ray_on_ecs.cluster import jobs
from ray_on_ecs.config import RunConfig
from ray_on_ecs.run.command_line import parse

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROGRAM = (ROOT / "__main__.py").read_text()
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")),
)
CLI = (ROOT / "docs" / "cli.md").read_text()
FAULT_TOLERANCE = (ROOT / "docs" / "fault-tolerance.md").read_text()
# Pages with flags of a run, a recipe or another command of ray-on-ecs.
PAGES_OF_RUNS = (
    "checkpoints", "fault-tolerance", "model-sizes", "ray-programs", "recipes", "run-folder", "scripts",
    "troubleshooting",
)  # fmt: skip
OF_OTHER_TOOLS = {
    "--build",
    "--data-dir",
    "--editable",
    "--exclude",
    "--file",
    "--index-url",
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


def section(document: str, title: str) -> str:
    return (ROOT / document).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(table: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)`", table, flags=re.MULTILINE)


def test_outputs_table_matches_the_exports() -> None:
    exported = re.findall(r'pulumi\.export\("(\w+)"', PROGRAM)
    assert first_column(section("docs/configuration.md", "Outputs")) == exported


def test_outputs_in_commands_are_exported() -> None:
    documents = "".join((ROOT / name).read_text() for name in DOCUMENTS)
    names = set(re.findall(r"pulumi stack output ([a-z]\w+)", documents))
    assert {"train_command", "shell_command", "bucket"} <= names
    for name in names:
        assert f'pulumi.export("{name}"' in PROGRAM, name


def test_make_commands_are_targets() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    documents = "".join((ROOT / name).read_text() for name in DOCUMENTS)
    used = set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", documents, flags=re.MULTILINE))
    used = {name for pair in used for name in pair if name}
    used |= set(re.findall(r"run: make ([a-z-]+)", (ROOT / ".github/workflows/ci.yml").read_text()))
    assert {"train", "test"} <= used
    assert used <= set(targets), f"no such target: {used - set(targets)}"


def test_mentioned_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = helps(capsys)
    text = README + "".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES_OF_RUNS)
    for flag in mentioned(text) - OF_OTHER_TOOLS - of_the_laptop():
        assert re.search(rf"{flag}\b", known), f"{flag} is not a flag of a command"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_shown_commands_have_known_flags(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags of the lines that start with ray-on-ecs, up to the script."""
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    known = of_the_laptop() | mentioned(capsys.readouterr().out)
    for line in re.findall(r"^ray-on-ecs (.*)", (ROOT / document).read_text(), flags=re.MULTILINE):
        assert line.split()[0] in COMMANDS, line
        assert mentioned(re.split(r"\.py\b|\$script|-m [\w.]+", line.partition("  #")[0])[0]) <= known, line


def helps(capsys: pytest.CaptureFixture[str]) -> str:
    """The flags of a run and of the packaged jobs."""
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    jobs = [ROOT / "training" / f"{name}.py" for name in ("image_classifier", "language_model")]
    return capsys.readouterr().out + "".join(
        subprocess.run([sys.executable, str(job), "--help"], text=True, capture_output=True, check=True).stdout
        for job in jobs
    )


def test_flags_of_the_cli_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = helps(capsys)
    for flag in mentioned(CLI) - of_the_laptop() - OF_OTHER_TOOLS - {"--head", "--help"}:
        assert re.search(rf"{flag}\b", known), flag
    assert set(first_words(CLI)) | {"completion"} == set(COMMANDS)


def mentioned(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def of_the_laptop() -> set[str]:
    """The flags of all verbs of ray-on-ecs."""
    context = click.Context(command_line)
    commands = [command_line.get_command(context, verb) for verb in COMMANDS]
    return {name for command in commands if command for each in command.params for name in each.opts}


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


def test_tree_lists_exactly_the_existing_files() -> None:
    tree = re.search(r"```\n(__main__\.py.*?)```", section("CONTRIBUTING.md", "The tree"), flags=re.DOTALL)
    assert tree is not None
    top, folder, named = "", "", set()
    for line in tree[1].splitlines():
        name, *words = line.split()
        if not line.startswith(" "):
            top = folder = name if name.endswith("/") else ""
        elif line.startswith("   "):  # continues the line before
            named |= {f"{folder}{word.strip(',')}.py" for word in (name, *words)}
            continue
        else:
            name = top + name
            folder = name if name.endswith("/") else folder
        named.add(name)
        if name.endswith("/"):
            named |= {f"{name}{word.strip(',')}.py" for word in words}
        assert (ROOT / name).exists(), f"{name} is not there"
    modules = {
        str(path.relative_to(ROOT))
        for part in ("infra", "training", "ray_on_ecs")
        for path in (ROOT / part).rglob("*.py")
    }
    modules = {name for name in modules if not name.endswith("__init__.py")}
    assert modules <= named, f"not in the tree: {modules - named}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_have_targets(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", text):
        assert ((ROOT / document).parent / target).exists(), f"{document} links to {target}"
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", text):
        linked = ((ROOT / document).parent / target).read_text() if target else text
        assert anchor in anchors(linked), f"{document} links to {target}#{anchor}"


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_named_tests_exist() -> None:
    tests: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tests.update(re.findall(r"^def (test_\w+)", path.read_text(), flags=re.MULTILINE))
    names: set[str] = set()
    for document in DOCUMENTS:
        names.update(re.findall(r"`(test_\w+)`", (ROOT / document).read_text()))
    assert len(names) >= 50
    assert names <= tests, f"no such test: {names - tests}"


def test_suppressed_checks_have_reasons() -> None:
    text = (ROOT / ".checkov.yaml").read_text()
    suppressed = yaml.safe_load(text)["skip-check"]
    reasons = dict(re.findall(r"((?:^  # .*\n)+)  - (CKV\w+)", text, flags=re.MULTILINE))
    explained = {check: reason for reason, check in reasons.items()}
    assert explained.keys() == set(suppressed)
    for check, reason in explained.items():
        assert len(reason.split()) >= 12, f"{check}: 'not needed' is not a reason"
