"""The model: resnet18 for small one-channel images, or a function of the user's own."""

import pkgutil
from collections.abc import Callable

from torch import nn

from ray_on_ecs.errors import UsageError


def resnet18_classifier(channels: int, classes: int) -> nn.Module:
    """Build torchvision's resnet18 with a stem that takes `channels` instead of 3.

    Maps float images [batch, channels, height, width] to logits [batch, classes].
    """
    from torchvision.models import resnet18  # takes seconds, and the driver doesn't need it

    model = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


MODELS: dict[str, Callable[[int, int], nn.Module]] = {"resnet18": resnet18_classifier}


def find(name: str) -> Callable[[int, int], nn.Module]:
    """Return the function that builds a model from its input channels and its number of classes.

    Args:
        name: A key of `MODELS`, or `package.module:function`.

    Raises:
        UsageError: There is no such model, or the import failed.
    """
    if name in MODELS:
        return MODELS[name]
    if ":" not in name:
        raise UsageError(f"--model: {name!r} is not known; use {', '.join(MODELS)} or package.module:function")
    try:
        found = pkgutil.resolve_name(name)
    except Exception as cause:  # the user's module may fail in any way
        reason = f"{type(cause).__name__}: {cause}"
        raise UsageError(
            f"--model: {name!r} can't be imported ({reason}); "
            "write package.module:function, without .py or slashes, as seen from the folder you start in"
        ) from cause
    if not callable(found):
        raise UsageError(f"--model: {name!r} is {type(found).__name__}, not a function that builds a model")
    return found


def build(name: str, channels: int, classes: int) -> nn.Module:
    """Build the model `name` for images of `channels` channels in `classes` classes.

    Raises:
        UsageError: There is no such model, or its function doesn't return a module.
    """
    model = find(name)(channels, classes)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model: {name!r} returned {type(model).__name__}, not a torch.nn.Module")
    return model
