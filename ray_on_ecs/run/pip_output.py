"""The reason of a failed `pip install`, from what it has written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

# Lines of a build that name an error: of Python, a compiler, CMake or git.
ERRORS = re.compile(
    r"^[\w.]*(?:Error|Exception|Exit|NotFound|Unavailable)\b:?|\berror: |\bfatal: |^CMake Error|^ERROR: ", re.IGNORECASE
)
# Of these, pip's names of its own errors, and lines that only say that another program has failed.
OF_PIP = re.compile(r"^(?:error: [a-z]+(?:-[a-z]+)+|(?:ERROR: )?Failed (?:to build|building).*)$")
SECONDARY = re.compile(
    r"error: command .*(?:exit|returned|status)|CalledProcessError|Error compiling objects|Could not read from remote",
    re.IGNORECASE,
)
BUILT = re.compile(r"^(?:ERROR: )?(?:Failed to build|Failed building wheel for) '?(.*?)'?(?: when .*)?$")
OF_METADATA = "\u00d7 Encountered error while generating package metadata"
# The title of a build's output, and its lines that say what it does.
OUTPUT = re.compile(r"\[\d+ lines? of output\]")
AT_WORK = re.compile(r"[a-z]+ing |Compiling |\[\d|.*Warning\b")
CONFLICT, END_OF_BUILD = "The conflict is caused by:", "[end of output]"
VERSIONS = re.compile(r"\(from versions: (?:[^()]*, )?((?:[^(),]+, ){2}[^(),]+)\)")
# With -vv: an index that can't be read, and files of a package that are not for this machine.
PASSED_OVER = re.compile(
    r"(?:Could not fetch URL |Skipping link: (?!wrong project|not a))(.*?)(?: - skipping)?$"
    r"|(The repository located at .* is not a trusted .*? host)"
)
LONG = 150
# The mark below a requirement that pip repeats.
CARET = re.compile(r"\s+~*\^\s*(\(.*\))?")
# Consequence of a reason.
CURES = {
    r"Cannot find command 'git'": "git is not installed here: install it, or name a release of the package",
    r"could not read Username|Authentication failed": "give a token: git+https://${TOKEN}@host/x and --secret TOKEN",
    r"No module named '(?:torch|numpy)'": "its build must see the installed packages: --env PIP_NO_BUILD_ISOLATION=0",
    r"No space left": "free some space on this disk",
    r"\b401\b": "give its password: https://user:${TOKEN}@host/simple/ and --secret TOKEN",
}


def reason_of(lines: Sequence[str], log: Sequence[str] = ()) -> str:
    """Return why pip has failed, with the way out if there is one.

    `lines` is its output with the indentation; `log` that with -vv, which has what it passes over.
    """
    texts = [line.strip().removeprefix("╰─> ") for line in lines if line.strip()]
    if CONFLICT in lines:
        start = lines.index(CONFLICT) + 1
        end = next((number for number in range(start, len(lines)) if not lines[number].strip()), len(lines))
        reason = "; ".join(line.strip() for line in lines[start:end])
    elif any(text.startswith("\u00d7") for text in texts):
        reason = _of_diagnosis(texts)
    else:
        reason = _of_errors(lines, log)
    if not reason.removeprefix("Exception:"):
        reason = texts[-1] if texts else "it wrote nothing"
    cure = next((cure for pattern, cure in CURES.items() if re.search(pattern, reason)), "")
    return VERSIONS.sub(r"(the newest are \1)", reason) + (cure and f"; {cure}")


def _of_diagnosis(texts: Sequence[str]) -> str:
    """Return the error of a build or of another program, such as git."""
    last = len(texts) - 1 - texts[::-1].index(END_OF_BUILD) if END_OF_BUILD in texts else len(texts)
    start = max(number for number, text in enumerate(texts[:last]) if text.startswith("\u00d7"))
    block = texts[start:]
    block = block[: block.index(END_OF_BUILD)] if END_OF_BUILD in block else texts
    errors = [text for text in block if ERRORS.search(text) and not OF_PIP.search(text)]
    begin = next((number for number, text in enumerate(texts) if number > start and OUTPUT.fullmatch(text)), start)
    errors = errors or [text for text in texts[begin + 1 : last] if not AT_WORK.match(text)][:1]
    said = [text for text in errors if not SECONDARY.search(text)] or errors
    built = [found[1] for text in texts if (found := BUILT.search(text))]
    built += [text.removeprefix("from ") for title, text in pairwise(texts) if title.startswith(OF_METADATA)]
    what = re.sub(r"^file:.*/", "", built[-1]) if built else ""
    title = f"{what} can't be built" if what else texts[start].strip("\u00d7 .")
    if not said:
        return title
    more = block[block.index(said[-1]) + 1 :] if said[-1].endswith(":") and said[-1] in block else []
    return " ".join([f"{title}: {said[-1].removeprefix('ERROR: ')}", *more[:1]])


def _of_errors(lines: Sequence[str], log: Sequence[str]) -> str:
    """Return pip's errors with the lines below them, and why it has passed over an index or files."""
    said: list[str] = []
    is_error = False
    for line in lines:
        is_error = line.startswith("ERROR: ") or (is_error and line.startswith((" ", "Hint: ")))
        if is_error and len(said) > 1 and (caret := CARET.fullmatch(line)):
            said[-2:] = [" ".join(filter(None, (said[-2], caret[1])))]
        elif is_error:
            text = line.removeprefix("ERROR: ").strip()
            said.append(text if len(text) < LONG else text.partition(". ")[0])
    if any("from versions: none" in text for text in said):
        passed = [found[1] or found[2] for line in log if (found := PASSED_OVER.search(line))]
        said = said[-1:] + passed[-1:] if passed else said
    return "; ".join(said)
