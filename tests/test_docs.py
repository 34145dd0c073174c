"""The documents' outputs, targets of make, links and tests exist."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROGRAM = (ROOT / "__main__.py").read_text()
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")),
)


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
    targets = re.findall(r"^([a-z./-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    documents = "".join((ROOT / name).read_text() for name in DOCUMENTS)
    used = set(re.findall(r"`make ([a-z./-]+)|^make ([a-z./-]+)", documents, flags=re.MULTILINE))
    used = {name for pair in used for name in pair if name}
    used |= set(re.findall(r"run: make ([a-z-]+)", (ROOT / ".github/workflows/ci.yml").read_text()))
    assert {"train", "test"} <= used
    assert used <= set(targets), f"no such target: {used - set(targets)}"


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
    assert names
    assert names <= tests, f"no such test: {names - tests}"


def test_suppressed_checks_have_reasons() -> None:
    text = (ROOT / ".checkov.yaml").read_text()
    reasons = re.findall(r"(?:^  # .*\n)+  - (CKV\w+)", text, flags=re.MULTILINE)
    assert reasons == yaml.safe_load(text)["skip-check"]
