"""How long the batches of packs are: as long as their samples, or padded to a few fixed shapes for a compiled model."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class PackShapes:
    """Fixed shapes: `num_tokens` tokens always, and patches up to the next of `patch_classes`.

    Patches are padded by images of their own, whose image tokens stand in the padded tail of the tokens: the model wants an
    image token for every `merge_size`^2 patches. So `num_tokens` leaves room for the widest step between two classes
    behind `seq_len`; more classes, less room.
    """

    seq_len: int
    """Most tokens that the samples of a pack have together."""
    patch_classes: tuple[int, ...]
    """Rising; the last holds the patches of any pack."""
    merge_size: int = 2

    def __post_init__(self) -> None:
        unit = self.merge_size**2
        classes = self.patch_classes
        if not classes or any(size < 1 or size % unit for size in classes) or list(classes) != sorted(set(classes)):
            raise PlanError(f"patch_classes are {classes}, wanted rising multiples of {unit}")

    @classmethod
    def even(
        cls, seq_len: int, *, max_patches: int | None = None, num_classes: int = 8, merge_size: int = 2
    ) -> PackShapes:
        """Returns `num_classes` evenly spaced classes up to `max_patches` (None: as many as `seq_len` image tokens have)."""
        unit = merge_size**2
        most = seq_len if max_patches is None else min(-(-max_patches // unit), seq_len)
        tokens = {-(-most * (i + 1) // num_classes) for i in range(num_classes)}
        return cls(seq_len=seq_len, patch_classes=tuple(unit * n for n in sorted(tokens)), merge_size=merge_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of every batch: `seq_len` and the room for image tokens of padding."""
        steps = [high - low for low, high in zip((0, *self.patch_classes), self.patch_classes, strict=False)]
        return self.seq_len + max(steps) // self.merge_size**2

    def num_patches(self, num_tokens: int, num_patches: int) -> int:
        """Returns the class of a pack of so many tokens and patches. Raises PlanError where it is over the shapes."""
        if num_tokens > self.seq_len or num_patches > self.patch_classes[-1]:
            raise PlanError(
                f"a pack has {num_tokens} tokens and {num_patches} patches, its batches have room for {self.seq_len} and "
                f"{self.patch_classes[-1]}; pad to the plan's own seq_len and max_patches"
            )
        return next(size for size in self.patch_classes if size >= num_patches)
