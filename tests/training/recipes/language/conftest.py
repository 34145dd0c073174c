import hashlib
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from training.recipes.language import corpus
from training.recipes.language.config import LanguageConfig
from training.recipes.language.corpus import Corpus

MODULES = ("argparse", "ast", "dataclasses", "decimal", "difflib", "doctest", "inspect", "ipaddress", "pdb", "typing")


@pytest.fixture(scope="session", autouse=True)
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What is made of corpora goes where the tests' other files do: this folder."""
    folder = tmp_path_factory.mktemp("node")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "node_folder", lambda kind, key: folder / kind / hashlib.sha256(key.encode()).hexdigest())
        yield folder


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some modules of Python's library: 600 kB."""
    folder = tmp_path_factory.mktemp("texts")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        shutil.copy(library / f"{name}.py", folder)
    return folder


@pytest.fixture(scope="session")
def code(texts: Path) -> Corpus:
    return corpus.load(str(texts), 0.05, 512)


@pytest.fixture
def config(tmp_path: Path, texts: Path) -> Callable[..., LanguageConfig]:
    """A valid config of a small model with the given settings changed."""

    def build(**settings: Any) -> LanguageConfig:
        values: dict[str, Any] = {
            "storage_path": str(tmp_path),
            "run_name": "test",
            "corpus": str(texts),
            "vocab_size": 512,
            "layers": 2,
            "width": 64,
            "heads": 4,
            "kv_heads": 2,
            "context": 64,
            "sample_tokens": 16,
            **settings,
        }
        return LanguageConfig(**values)

    return build
