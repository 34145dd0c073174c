"""Changes to a batch of training images, on the device it is on; what changes is drawn for the whole epoch at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Changes:
    """What happens to each of n images: `mirror` bool [n], `shift` int64 [n, 2] in pixels down and right.

    None is nothing at all.
    """

    mirror: Tensor | None
    shift: Tensor | None

    @classmethod
    def draw(cls, n: int, mirror: bool, farthest: int, random: torch.Generator) -> Changes:
        """Mirror half of the images if `mirror`, and move each by up to `farthest` pixels either way."""
        turned = torch.rand(n, generator=random) < 0.5 if mirror else None
        return cls(turned, torch.randint(-farthest, farthest + 1, (n, 2), generator=random) if farthest else None)

    def __getitem__(self, part: slice) -> Changes:
        return Changes(*(None if each is None else each[part] for each in (self.mirror, self.shift)))

    def to(self, device: torch.device) -> Changes:
        """The same changes on another device."""
        return Changes(*(None if each is None else each.to(device) for each in (self.mirror, self.shift)))

    def apply(self, images: Tensor) -> Tensor:
        """The changed images; `images` is [n, channels, height, width] of any type."""
        turned = images if self.mirror is None else mirror(images, self.mirror)
        return turned if self.shift is None else move(turned, self.shift)


def mirror(images: Tensor, which: Tensor) -> Tensor:
    """The images with those of `which`, bool [n], turned left to right."""
    return torch.where(which[:, None, None, None], images.flip(-1), images)


def move(images: Tensor, shift: Tensor) -> Tensor:
    """Each image moved down and right by its `shift`, int64 [n, 2]; what comes in is 0."""
    n, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device) - shift[:, :1]
    columns = torch.arange(width, device=images.device) - shift[:, 1:]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    pixels = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    moved = images.flatten(2).gather(2, pixels.view(n, 1, -1).expand(n, channels, -1)).view_as(images)
    return moved * inside[:, None]
