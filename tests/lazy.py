"""Modules whose import takes seconds: torchvision, transformers and Ray Train."""

import importlib
from types import ModuleType
from typing import Any


class LazyModule(ModuleType):
    """A module that is imported when a test first uses it, not when pytest collects the tests."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(importlib.import_module(self.__name__), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(importlib.import_module(self.__name__), name)
