"""Modules whose import takes seconds: torchvision, transformers and Ray Train."""

import importlib.util
import sys
from types import ModuleType


def lazy(name: str) -> ModuleType:
    """Return a module that is imported when a test uses it first, not when pytest collects the tests."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec
    assert spec.loader
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)  # as an import does
    return module
