"""HTML pages from the templates of this folder. Each is one file that needs no other."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent


def render_page(template: str, **values: Any) -> str:
    """Return the page of a template; a text in its values is never markup."""
    pages = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FileSystemLoader(FOLDER),
    )
    pages.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return pages.get_template(template).render(**values)


def script(name: str) -> dict[str, str]:
    """Return a script of this folder for a page, and its digest, by which the page's policy allows no other."""
    text = (FOLDER / name).read_text()
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"script": Markup(text), "digest": f"sha256-{digest}"}
