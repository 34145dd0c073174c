"""batch_size.py: the search for the largest micro-batch, without a GPU."""

import pytest

from tests.lazy import Lazy

batch_size = Lazy("ray_on_ecs.recipes.batch_size")


@pytest.mark.parametrize(
    ("limit", "most", "largest", "tried"),
    [
        (100, 16, 16, [1, 2, 4, 8, 16]),
        (7, 16, 4, [1, 2, 4, 8]),
        (100, 6, 6, [1, 2, 4, 6]),
        (5, 6, 4, [1, 2, 4, 6]),
        (100, 1, 1, [1]),
        (0, 16, 1, [1]),
    ],
)
def test_largest_size_that_fits_is_found(limit: int, most: int, largest: int, tried: list[int]) -> None:
    sizes: list[int] = []

    def fits(size: int) -> bool:
        sizes.append(size)
        return size <= limit

    assert batch_size.largest_fitting(fits, most) == largest
    assert sizes == tried


@pytest.mark.parametrize(
    ("peaks", "size", "would_fit"),
    [
        ([], 1, True),
        ([(1, 95)], 2, True),
        ([(1, 20), (2, 30)], 4, True),  # 10 for each, so 50
        ([(1, 20), (2, 30), (4, 50)], 8, True),  # 90
        ([(1, 20), (2, 35), (4, 65)], 8, False),  # 125
        ([(1, 20), (2, 35), (4, 65)], 6, True),  # 95
    ],
)
def test_memory_of_the_next_size_is_expected(peaks: list[tuple[int, int]], size: int, would_fit: bool) -> None:
    assert batch_size.memory_would_fit(peaks, size, limit=100) is would_fit
