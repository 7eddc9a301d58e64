from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PlanError
from forebay.train.collate.packed import PackShapes


@given(
    seq_len=st.integers(1, 9000),
    max_patches=st.none() | st.integers(1, 40_000),
    num_classes=st.integers(1, 9),
    merge_size=st.integers(1, 3),
    share=st.floats(0, 1),
)
def test_padding_of_every_pack_has_room(
    seq_len: int, max_patches: int | None, num_classes: int, merge_size: int, share: float
) -> None:
    shapes = PackShapes.even(seq_len, max_patches=max_patches, num_classes=num_classes, merge_size=merge_size)
    unit = merge_size**2
    most = shapes.patch_classes[-1]
    assert len(shapes.patch_classes) <= num_classes
    assert most == unit * seq_len if max_patches is None else most >= min(max_patches, unit * seq_len)
    num_patches = int(share * most) // unit * unit
    room = shapes.num_patches(seq_len, num_patches)  # all of seq_len is taken: the tightest case
    assert room in shapes.patch_classes
    assert room >= num_patches
    assert seq_len + (room - num_patches) // unit <= shapes.num_tokens


def test_more_classes_need_less_room() -> None:
    assert PackShapes.even(8192, max_patches=32_768).patch_classes == tuple(range(4096, 32_769, 4096))
    assert [PackShapes.even(8192, num_classes=n).num_tokens for n in (1, 8, 32)] == [16_384, 9216, 8448]


@pytest.mark.parametrize("classes", [(), (6,), (0, 4), (8, 4), (4, 4)])
def test_impossible_classes_are_refused(classes: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="wanted rising multiples of 4"):
        PackShapes(seq_len=100, patch_classes=classes)


@pytest.mark.parametrize(("tokens", "patches"), [(101, 4), (100, 20)])
def test_packs_over_the_shapes_are_refused(tokens: int, patches: int) -> None:
    shapes = PackShapes(seq_len=100, patch_classes=(8, 16))
    with pytest.raises(PlanError, match=f"{tokens} tokens and {patches} patches, .* room for 100 and 16"):
        shapes.num_patches(tokens, patches)
