"""Pages of the site, from the files that GitHub shows: README as the index, and links to files outside `docs/`.

MkDocs calls these functions: https://www.mkdocs.org/user-guide/plugins/#events
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages that aren't in docs/ under their own name.
PAGES = {"README.md": "index.md", "docs/README.md": "contents.md"}
# Of the npm package, since Material's own address is outside the site.
MERMAID = "assets/mermaid.min.js"
LINK = re.compile(r"(?P<before>\]\(|(?:src|href)=\")(?P<path>[^\s()#\":]+)")


def on_config(config: Any) -> None:
    """Set the order of the pages: that of the links in `docs/README.md`."""
    linked = list(dict.fromkeys(re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "README.md").read_text())))
    unlinked = sorted({path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"README.md", *linked})
    pages = linked + unlinked
    config.nav = [
        {"ray-on-ecs": "index.md"},
        {"Contents": "contents.md"},
        *(page for page in pages if "/" not in page),
        {"Design": [page for page in pages if "/" in page]},
    ]


def on_files(files: Any, config: Any) -> None:
    """Add the pages outside `docs/`, the script that draws diagrams, and the style."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    files.append(File.generated(config, MERMAID, abs_src_path=os.environ["MERMAID"]))
    files.append(File.generated(config, "assets/site.css", abs_src_path=str(ROOT / "website" / "site.css")))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let the links of a page lead to pages of the site, or else to the repository."""
    sources = {name: source for source, name in PAGES.items()}
    folder = PurePosixPath(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def link(match: re.Match[str]) -> str:
        path = os.path.normpath(folder / match["path"])
        if not (ROOT / path).exists():
            return match[0]
        if path in PAGES or (path.startswith("docs/") and (ROOT / path).is_file() and not path.endswith(".py")):
            name = PAGES.get(path, path.removeprefix("docs/"))
            target = os.path.relpath(name, PurePosixPath(page.file.src_uri).parent)
        elif repository := os.environ.get("REPOSITORY_URL"):
            target = f"{repository}/blob/HEAD/{path}"
        else:
            target = (ROOT / path).as_uri()
        return match["before"] + target

    return LINK.sub(link, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load the script of diagrams where there are some, before Material would load its own."""
    if '<pre class="mermaid">' not in output:
        return output
    head, end, body = output.partition("</head>")
    return f'{head}<script src="{"../" * page.url.count("/")}{MERMAID}"></script>{end}{body}'
