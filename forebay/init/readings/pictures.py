"""A folder of images: of classes, with texts beside them, or of nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.config.data import PICTURES, TEXT_OF_IMAGE
from forebay.init.choose import Choice, Chooser
from forebay.init.found import Found, Reading, counted
from forebay.init.media import pictures_of
from forebay.init.readings.own import Own, above, own_files
from forebay.init.reads import prompt_of
from forebay.init.tree import Tree, extension_of, spread
from forebay.visible import from_here

_MOST = 0.5
"""The share of images that has to have a class, or a text."""
_TEXTS = 50
_MAX_TEXT_BYTES = 64 * 1024
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Images:
    """Images of a folder. classes: how many each first folder below `folders` has. texts: names of files of texts."""

    own: Own
    folders: list[str]
    classes: Counter[str]
    texts: list[str]

    @property
    def has_classes(self) -> bool:
        """Whether folders are classes: there are several, and most images lie in one."""
        in_folders = sum(self.classes.values())
        return len(self.classes) > 1 and in_folders >= _MOST * len(self.own.names)

    @property
    def has_texts(self) -> bool:
        """Whether most images have a text."""
        return len(self.texts) >= _MOST * len(self.own.names)

    @property
    def possible(self) -> list[Choice[str]]:
        """What can be read beside the images, the likeliest first."""
        found = []
        if self.has_texts:
            found.append(Choice(f"{counted(len(self.texts), 'files')} NAME.txt beside them", "plain", "plain"))
        if self.has_classes:
            shown = ", ".join(sorted(self.classes)[:_SHOWN]) + ", ..." * (len(self.classes) > _SHOWN)
            found.append(Choice(f"folders of {len(self.classes)} classes: {shown}", "label", "label"))
        return found


def picture_reading(tree: Tree) -> Reading | None:
    """Returns the reading of a tree as images; None where it holds none, or more recordings than images."""
    names = tree.names(frozenset(PICTURES))
    if not names or len(tree.audio) > len(names):
        return None
    images = _images(tree, names)
    has = [choice.label for choice in images.possible]
    label = f"{counted(len(images.own.names), 'images')}, {' and '.join(has) or 'alone'}"
    return Reading(
        kind="folder",
        label=label,
        score=34 if has else 5,
        settle=lambda chooser: _found(tree, images, chooser),
        modality="vision",
        name="images",
    )


def _images(tree: Tree, names: list[str]) -> _Images:
    own = own_files(names)
    deepest = above(own.counts)
    folders = own.folders if len(own.folders) > 1 else [deepest]
    classes: Counter[str] = Counter()
    for folder, count in own.counts.items():
        base = next((each for each in folders if not each or folder == each or folder.startswith(f"{each}/")), "")
        if first := folder[len(base) :].lstrip("/").partition("/")[0]:
            classes[first] += count
    stems = {name.rpartition(".")[0] for name in own.names}
    texts = [name for name in tree.names(frozenset(TEXT_OF_IMAGE)) if name.rpartition(".")[0] in stems]
    return _Images(own, folders, classes, texts)


def _found(tree: Tree, images: _Images, chooser: Chooser) -> Found:
    own = images.own
    prompt, notes = prompt_of(from_here(tree.root), images.possible, chooser)
    left = [f"Other splits are left out: {', '.join(own.others)}."] if own.others else []
    without = len(own.names) - (sum(images.classes.values()) if prompt == "label" else len(images.texts))
    if prompt in ("label", "plain") and without:
        left.append(f"{without:,} images have no {'class' if prompt == 'label' else 'text'} and are left out.")
    return Found(
        kind="folder",
        modality="vision",
        prompt=prompt,
        manifests=tuple(tree.path(folder) for folder in images.folders),
        noun=_noun(own.names),
        count=len(own.names),
        is_exact=tree.is_whole,
        pictures=pictures_of([tree.path(name) for name in spread(own.names)]),
        texts=_read(tree, images.texts) if prompt == "plain" else [],
        images_a_row=[1],
        classes=images.classes if prompt == "label" else Counter(),
        has_all_classes=tree.is_whole,
        notes=[*left, *notes],
        has_text=prompt != "none",
    )


def _read(tree: Tree, names: Sequence[str]) -> list[str]:
    found = []
    for name in spread(names, _TEXTS):
        try:
            with open(tree.path(name), "rb") as file:
                found.append(file.read(_MAX_TEXT_BYTES).decode("utf-8-sig", "replace").strip())
        except OSError:
            continue
    return found


def _noun(names: Sequence[str]) -> str:
    kinds = Counter(extension_of(name)[1:] for name in names)
    return f"{kinds.most_common(1)[0][0]} files" if len(kinds) == 1 else "images"
