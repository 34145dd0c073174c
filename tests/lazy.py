"""Modules whose import takes seconds: torchvision, transformers and Ray Train."""

from importlib import import_module
from types import ModuleType
from typing import Any


class Lazy(ModuleType):
    """A module that is imported when a test first uses it, not when pytest collects the tests."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_mock", "_pytest", "pytest")):  # pytest looks for these while it collects
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)

    def __setattr__(self, name: str, value: object) -> None:
        module = import_module(self.__name__)
        vars(self).setdefault("__replaced__", {}).setdefault(name, getattr(module, name))
        setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        """Restore the module's own value: so does monkeypatch with a name that is not in `vars`."""
        setattr(import_module(self.__name__), name, vars(self)["__replaced__"][name])
