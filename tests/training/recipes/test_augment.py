import torch

from training.recipes.images.augment import Augmentation, flip_horizontally, translate


def picture(n: int = 1, channels: int = 1) -> torch.Tensor:
    """Images of different pixels, none of them black."""
    return (torch.arange(n * channels * 36) % 255 + 1).to(torch.uint8).view(n, channels, 6, 6)


def test_a_shift_moves_down_and_right_and_lets_black_in() -> None:
    images = picture(channels=3)
    moved = translate(images, torch.tensor([[2, 1]]), 2)
    assert torch.equal(moved[..., 2:, 1:], images[..., :-2, :-1])
    assert moved[..., :2, :].max() == 0, "two rows came in from above"
    assert moved[..., :, :1].max() == 0, "one column came in from the left"


def test_a_negative_shift_moves_up_and_left() -> None:
    images = picture()
    assert torch.equal(translate(images, torch.tensor([[-2, -1]]), 2)[..., :-2, :-1], images[..., 2:, 1:])


def test_each_image_has_a_shift_of_its_own() -> None:
    images = picture(2)
    moved = translate(images, torch.tensor([[0, 0], [0, 2]]), 2)
    assert torch.equal(moved[0], images[0])
    assert torch.equal(moved[1, :, :, 2:], images[1, :, :, :-2])


def test_only_the_chosen_images_are_mirrored() -> None:
    images = picture(2)
    flipped = flip_horizontally(images, torch.tensor([True, False]))
    assert torch.equal(flipped[0], images[0].flip(-1))
    assert torch.equal(flipped[1], images[1])


def test_what_is_drawn_covers_every_shift_and_half_of_the_mirrorings() -> None:
    changes = Augmentation.draw(10_000, True, 3, torch.Generator().manual_seed(0))
    assert changes.shift is not None
    assert changes.flipped is not None
    assert changes.shift.unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]
    assert 0.48 < changes.flipped.double().mean() < 0.52


def test_nothing_changes_where_nothing_is_wanted() -> None:
    images = picture(4)
    changes = Augmentation.draw(4, False, 0, torch.Generator().manual_seed(0))
    assert torch.equal(changes.apply(images), images), "a mirrored 2 is no digit"


def test_a_shift_may_be_larger_than_the_image() -> None:
    assert translate(picture(), torch.tensor([[7, 0]]), 7).max() == 0
