"""Changes to a batch of training images, on the device it is on; what changes is drawn for the whole epoch at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Changes:
    """What happens to each of n images: `mirror` bool [n], `shift` int64 [n, 2] in pixels down and right.

    None is nothing at all. No shift is by more than `farthest` pixels, either way.
    """

    mirror: Tensor | None
    shift: Tensor | None
    farthest: int = 0

    @classmethod
    def draw(cls, n: int, mirror: bool, farthest: int, random: torch.Generator) -> Changes:
        """Mirror half of the images if `mirror`, and move each by up to `farthest` pixels either way."""
        turned = torch.rand(n, generator=random) < 0.5 if mirror else None
        shift = torch.randint(-farthest, farthest + 1, (n, 2), generator=random) if farthest else None
        return cls(turned, shift, farthest)

    def __getitem__(self, part: slice) -> Changes:
        return self._each(lambda values: values[part])

    def to(self, device: torch.device) -> Changes:
        """The same changes on another device."""
        return Changes(
            *(None if each is None else each.to(device) for each in (self.mirror, self.shift)), self.farthest
        )

    def apply(self, images: Tensor) -> Tensor:
        """The changed images; `images` is uint8 [n, channels, height, width]."""
        turned = images if self.mirror is None else mirror(images, self.mirror)
        return turned if self.shift is None else move(turned, self.shift, self.farthest)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Changes:
        mirror, shift = (None if values is None else change(values) for values in (self.mirror, self.shift))
        return Changes(mirror, shift, self.farthest)


def mirror(images: Tensor, which: Tensor) -> Tensor:
    """The uint8 images with those of `which`, bool [n], turned left to right."""
    # In arithmetic modulo 256 this is exact, and faster than torch.where with a mask to spread over each image.
    return images + which.to(images.dtype)[:, None, None, None] * (images.flip(-1) - images)


def move(images: Tensor, shift: Tensor, farthest: int) -> Tensor:
    """Each image moved down and right by its `shift`, int64 [n, 2] from -farthest to farthest; what comes in is 0."""
    height, width = images.shape[-2:]
    # [n, channels, 2 farthest + 1, 2 farthest + 1, height, width]: a view of every window there is.
    windows = pad(images, [farthest] * 4).unfold(2, height, 1).unfold(3, width, 1)
    each = torch.arange(len(images), device=images.device)
    return windows[each, :, farthest - shift[:, 0], farthest - shift[:, 1]]
