"""Augmentation of training images on their device, drawn for a whole epoch at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Augmentation:
    """The changes of n images.

    Attributes:
        flipped: Which are flipped left to right, bool [n]; None flips none.
        shift: Pixels down and right that each is moved by, int64 [n, 2] in [-max_shift, max_shift]; None moves none.
        max_shift: The largest shift, in pixels.
    """

    flipped: Tensor | None
    shift: Tensor | None
    max_shift: int = 0

    @classmethod
    def draw(cls, n: int, flip: bool, max_shift: int, generator: torch.Generator) -> Augmentation:
        """Flip half of n images if `flip`, and move each by up to `max_shift` pixels in each direction."""
        flipped = torch.rand(n, generator=generator) < 0.5 if flip else None
        shift = torch.randint(-max_shift, max_shift + 1, (n, 2), generator=generator) if max_shift else None
        return cls(flipped, shift, max_shift)

    def __getitem__(self, part: slice) -> Augmentation:
        return self._each(lambda values: values[part])

    def to(self, device: torch.device) -> Augmentation:
        """Return the same changes on another device."""
        return self._each(lambda values: values.to(device))

    def clone(self) -> Augmentation:
        """Return the same changes in memory of their own."""
        return self._each(Tensor.clone)

    def apply(self, images: Tensor) -> Tensor:
        """Return the changed images; `images` is uint8 [n, channels, height, width]."""
        if self.flipped is not None:
            images = flip_horizontally(images, self.flipped)
        if self.shift is not None:
            images = translate(images, self.shift, self.max_shift)
        return images

    def _each(self, change: Callable[[Tensor], Tensor]) -> Augmentation:
        flipped = None if self.flipped is None else change(self.flipped)
        shift = None if self.shift is None else change(self.shift)
        return Augmentation(flipped, shift, self.max_shift)


def flip_horizontally(images: Tensor, which: Tensor) -> Tensor:
    """Flip those of the uint8 images [n, channels, height, width] that `which`, bool [n], names."""
    # In arithmetic modulo 256 this is exact, and faster than torch.where, whose mask would be spread over each image.
    return images + which.to(images.dtype)[:, None, None, None] * (images.flip(-1) - images)


def translate(images: Tensor, shift: Tensor, max_shift: int) -> Tensor:
    """Move each image down and right by its `shift`, int64 [n, 2] in [-max_shift, max_shift]; new pixels are 0."""
    height, width = images.shape[-2:]
    # [n, channels, 2 max_shift + 1, 2 max_shift + 1, height, width]: a view of every window there is.
    windows = pad(images, [max_shift] * 4).unfold(2, height, 1).unfold(3, width, 1)
    each = torch.arange(len(images), device=images.device)
    return windows[each, :, max_shift - shift[:, 0], max_shift - shift[:, 1]]
