"""Augmentation of training images on their device; the random draws are made for a whole epoch at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Augmentation:
    """What happens to each of n images: `mirror` bool [n], `shift` int64 [n, 2] in pixels down and right.

    None is nothing at all. No shift is by more than `max_shift` pixels, either way.
    """

    mirror: Tensor | None
    shift: Tensor | None
    max_shift: int = 0

    @classmethod
    def draw(cls, n: int, mirror: bool, max_shift: int, generator: torch.Generator) -> Augmentation:
        """Mirror half of the images if `mirror`, and move each by up to `max_shift` pixels either way."""
        flipped = torch.rand(n, generator=generator) < 0.5 if mirror else None
        shift = torch.randint(-max_shift, max_shift + 1, (n, 2), generator=generator) if max_shift else None
        return cls(flipped, shift, max_shift)

    def __getitem__(self, part: slice) -> Augmentation:
        return self._each(lambda values: values[part])

    def to(self, device: torch.device) -> Augmentation:
        """The same changes on another device."""
        return Augmentation(
            *(None if each is None else each.to(device) for each in (self.mirror, self.shift)), self.max_shift
        )

    def apply(self, images: Tensor) -> Tensor:
        """The changed images; `images` is uint8 [n, channels, height, width]."""
        flipped = images if self.mirror is None else mirror(images, self.mirror)
        return flipped if self.shift is None else move(flipped, self.shift, self.max_shift)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Augmentation:
        mirror, shift = (None if values is None else change(values) for values in (self.mirror, self.shift))
        return Augmentation(mirror, shift, self.max_shift)


def mirror(images: Tensor, which: Tensor) -> Tensor:
    """The uint8 images with those of `which`, bool [n], flipped left to right."""
    # In arithmetic modulo 256 this is exact, and faster than torch.where with a mask to spread over each image.
    return images + which.to(images.dtype)[:, None, None, None] * (images.flip(-1) - images)


def move(images: Tensor, shift: Tensor, max_shift: int) -> Tensor:
    """Each image moved down and right by its `shift`, int64 [n, 2] from -max_shift to max_shift; what comes in is 0."""
    height, width = images.shape[-2:]
    # [n, channels, 2 max_shift + 1, 2 max_shift + 1, height, width]: a view of every window there is.
    windows = pad(images, [max_shift] * 4).unfold(2, height, 1).unfold(3, width, 1)
    each = torch.arange(len(images), device=images.device)
    return windows[each, :, max_shift - shift[:, 0], max_shift - shift[:, 1]]
