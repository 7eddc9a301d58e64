"""`forebay cache rm` and `prune`: what goes by name or by rules, why everything else stays, and what that frees.

Conditions on caches narrow each other down: a cache goes if all that are given hold for it. Kept texts go by age and by
size, as caches do. Rules of other kinds add to what goes. Without `is_wanted` nothing is removed.

An item is looked at, locked, renamed aside, looked at again, then deleted by descriptors. A kill at any moment leaves
it where it was, or aside under a name that the next `sweep` or prune removes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forebay.caches.cache_list import Wanted
from forebay.caches.guard import Guard, Processes, in_use, is_mount_within, locked, opened, strangers
from forebay.caches.kinds import KINDS, option_names
from forebay.caches.root_items import (
    FOLDER,
    File,
    Inode,
    Kept,
    Root,
    RootContents,
    RootItem,
    Survey,
    ago,
    contents_of,
    entered,
    sizes_of,
)
from forebay.caches.survey import remove_stored
from forebay.errors import ConfigError
from forebay.store.files import temporary_name
from forebay.store.layout import NOTES
from forebay.store.memo import uses_of
from forebay.store.metadata import FILE_NAME
from forebay.terminal import Progress, wrapped
from forebay.visible import from_here, human_bytes, printable

_UNITS = {"": 1, "B": 1, **{f"{unit}B": 1000**power for power, unit in enumerate("kMGTP", 1)}}
Did = Literal["would go", "gone", "stays"]


def remove(item: RootItem, guard: Guard) -> str | None:
    """Removes an item and returns None, or why it stays: it is in use by now, or not what was surveyed."""
    root = guard.root
    if (why := guard.reason(item)) is not None:
        return why
    if item.remote is not None:
        return remove_stored(item, item.remote)
    try:
        with opened(root, item) as (descriptor, parent):
            if descriptor is None:
                return _remove_file(item, parent)
            with locked(root, item, descriptor, force=guard.force) as problem:
                return problem or _remove_folder(guard, item, descriptor, parent)
    except FileNotFoundError:
        return "it is gone, or replaced"
    except OSError as err:
        return f"it cannot be removed: {err.strerror}"


def _remove_file(item: RootItem, parent: int) -> str | None:
    name = os.path.basename(item.name)
    aside = temporary_name(Path(name)).name
    os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
    status = os.stat(aside, dir_fd=parent, follow_symlinks=False)
    if (status.st_dev, status.st_ino) != item.file.inode:
        return _put_back(aside, name, parent, "another file has its name by now")
    os.unlink(aside, dir_fd=parent)
    return None


def _remove_folder(guard: Guard, item: RootItem, descriptor: int, parent: int) -> str | None:
    """Removes an opened folder whose lock is held."""
    name = os.path.basename(item.name)
    aside = temporary_name(Path(name)).name
    os.utime(descriptor)  # a sweep of another host takes what is aside and old
    os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
    place = guard.root.folder / os.path.dirname(item.name) / aside
    contents = contents_of(descriptor, device=guard.root.device)
    why = _changed(guard, item, parent, aside) or strangers(item, contents, descriptor, place)
    if why is None and is_mount_within(place):
        why = "another disk is mounted in it"
    if (why := why or in_use(place, contents, Processes(guard.root.folder))) is not None:
        return _put_back(aside, name, parent, why)
    _delete(descriptor, contents)
    os.rmdir(aside, dir_fd=parent)
    for file in item.beside:
        holder, name = os.path.split(file.name)
        with contextlib.suppress(OSError), entered(holder, within=guard.root.descriptor) as above:
            os.unlink(name, dir_fd=above)
    forget(guard.root, item)
    return None


def _changed(guard: Guard, item: RootItem, parent: int, aside: str) -> str | None:
    """Returns why what was renamed is not what was decided on, or was used since."""
    status = os.stat(aside, dir_fd=parent, follow_symlinks=False)
    if (status.st_dev, status.st_ino) != item.file.inode:
        return "another folder has its name by now"
    noted = uses_of(guard.root.descriptor, item.name)
    if noted and (not item.uses or noted[0].used_ns > item.uses[0].used_ns) and not guard.force:
        return "it was used just now"
    return None


def _put_back(aside: str, name: str, parent: int, why: str) -> str:
    """Gives what was put aside its name again, unless something else has it by now."""
    try:
        if os.path.lexists(f"/proc/self/fd/{parent}/{name}"):
            raise FileExistsError(name)
        os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        return f"{why}, and something else has its name: the earlier one is {aside} until nobody reads it"
    return why


def _delete(descriptor: int, contents: RootContents) -> None:
    """Deletes exactly what was seen in a folder. Each folder is entered by its number, so no link leads out."""
    with contextlib.ExitStack() as stack:
        folders: dict[str, int] = {"": descriptor}
        for file in contents.files:
            if file.kind == "folder":
                folders[file.name] = _entered(folders, file)
                stack.callback(os.close, folders[file.name])
        # The metadata go last: until then the lock on them tells a sweep that somebody is at work.
        for file in sorted(contents.files, key=lambda file: file.name == FILE_NAME):
            if file.kind == "file":
                where, name = os.path.split(file.name)
                os.unlink(name, dir_fd=folders[where])
        for file in reversed(contents.files):
            if file.kind == "folder":
                where, name = os.path.split(file.name)
                os.rmdir(name, dir_fd=folders[where])


def _entered(folders: Mapping[str, int], file: File) -> int:
    where, name = os.path.split(file.name)
    descriptor = os.open(name, FOLDER, dir_fd=folders[where])
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != file.inode:
        os.close(descriptor)
        raise FileNotFoundError(2, "it was replaced meanwhile", file.name)
    return descriptor


def forget(root: Root, item: RootItem) -> None:
    """Removes the notes of an item that is gone."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        holder, notes = -1, root.descriptor
        for part in (NOTES, *item.name.split("/")):
            holder, notes = notes, stack.enter_context(entered(part, within=notes))
        for entry in os.listdir(notes):
            os.unlink(entry, dir_fd=notes)
        os.rmdir(os.path.basename(item.name), dir_fd=holder)


def parse_size(text: str) -> int:
    """Returns the bytes of a size as `500G`, `1.5TB` or `800 MB`, in units of 1000. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([kKMGTP]?B?)", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"{text!r:.40} is no size; wanted a number and a unit: 500GB, 1.5TB, 800MB")
    unit = found[2].replace("K", "k")
    return int(float(found[1]) * _UNITS[unit if unit in _UNITS else f"{unit}B"])


def parse_age(text: str) -> float:
    """Returns the seconds of an age as `30d`, `12h` or `8w`. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?) ?([hdw])", text.strip(), re.ASCII)
    if found is None:
        raise ConfigError(f"{text!r:.40} is no age; wanted a number and h, d or w: 30d, 12h, 8w")
    return float(found[1]) * {"h": 3600.0, "d": 24 * 3600.0, "w": 7 * 24 * 3600.0}[found[2]]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules that choose what goes. older_than_s, unwanted, max_bytes choose caches; the others choose other kinds.

    older_than_s: caches and kept texts that were not used for so long. unwanted: caches that no config wants.
    max_bytes: the caches and kept texts that were used longest ago, until everything under the root takes no more.
    leftovers: of builds whose processes are gone. kinds: names of the table, each by its rule there.
    """

    older_than_s: float | None = None
    unwanted: bool = False
    max_bytes: int | None = None
    leftovers: bool = False
    kinds: Collection[str] = ()

    @property
    def of_caches(self) -> bool:
        """Whether a rule chooses caches, or kept texts."""
        return self.older_than_s is not None or self.unwanted or self.max_bytes is not None

    def take(self, kept: Kept) -> bool:
        """Returns whether a rule chooses from a kind that has a rule of its own."""
        return kept.name in self.kinds or (self.leftovers and kept.rule == "leftovers")

    def require_one(self) -> None:
        """Raises ConfigError where no rule is given: nothing goes by default."""
        if not (self.of_caches or self.leftovers or self.kinds):
            raise ConfigError(
                "prune removes nothing without a rule; for caches and kept texts: --older-than 30d, "
                "--unwanted CONFIG..., --max-size 500G (several: all must hold); for the rest: --leftovers, and "
                f"--kind NAME of {', '.join(option_names())}"
            )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The fate of an item, and why."""

    item: RootItem
    goes: bool
    reason: str


@dataclass(kw_only=True)
class RemovalReport:
    """The items that went, or would go. stayed: items that should have gone and are still there, with the reason.

    over_bytes: how far all that stays is above `--max-size`.
    """

    survey: Survey
    decisions: Sequence[Decision]
    is_done: bool = False
    stayed: dict[str, str] = field(default_factory=dict)
    over_bytes: int = 0

    @property
    def going(self) -> list[RootItem]:
        """The items that go, or went."""
        return [d.item for d in self.decisions if d.goes and d.item.name not in self.stayed]

    @property
    def freed_bytes(self) -> int:
        """The bytes that removal frees: a file of several links frees its bytes only if all links go."""
        return sizes_of(file for item in self.going for file in item.files).exclusive_bytes

    @property
    def is_whole(self) -> bool:
        """Whether all that was asked for is done, or would be."""
        return not self.stayed and not self.over_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `--json`."""
        return {
            "root": self.survey.root.place,
            "dry_run": not self.is_done,
            "freed_bytes": self.freed_bytes,
            "over_bytes": self.over_bytes,
            "items": [self._document(decision) for decision in self.decisions],
        }

    def _document(self, decision: Decision) -> dict[str, Any]:
        name = decision.item.name
        goes = decision.goes and name not in self.stayed
        did: Did = "stays" if not goes else "gone" if self.is_done else "would go"
        return {
            "name": name,
            "kind": decision.item.kind,
            "did": did,
            "reason": self.stayed.get(name, decision.reason),
            "size_bytes": decision.item.sizes.size_bytes,
        }

    def lines(self) -> Iterator[str]:
        """Yields what goes, with the reason, then what stays, then what that frees and how to do it."""
        going = [d for d in self.decisions if d.goes and d.item.name not in self.stayed]
        staying = [d for d in self.decisions if not d.goes or d.item.name in self.stayed]
        yield from self._part("gone" if self.is_done else "would go", going)
        yield from self._part("stays", staying)
        yield self._summary()
        if self.over_bytes:
            yield f"the bound does not hold: {human_bytes(self.over_bytes)} are too much, and nothing else may go"

    def _part(self, head: str, decisions: Sequence[Decision]) -> Iterator[str]:
        for number, decision in enumerate(decisions):
            if not number:
                yield f"{head}:"
            item, reason = decision.item, self.stayed.get(decision.item.name, decision.reason)
            yield f"  {printable(item.name)}, {human_bytes(item.sizes.size_bytes)}"
            yield from wrapped("    ", printable(reason))

    def _summary(self) -> str:
        count, freed = len(self.going), human_bytes(self.freed_bytes)
        if self.is_done:
            return f"{count} removed from {from_here(self.survey.root.place)}, {freed} freed"
        if not count:
            return f"nothing would go from {from_here(self.survey.root.place)}"
        return f"{count} would go, which frees {freed}; nothing was removed: add --yes"


def decide(survey: Survey, rules: Rules, guard: Guard, wanted: Wanted | None) -> list[Decision]:
    """Returns what becomes of every item of the kinds that the rules choose from, by kind and name."""
    rules.require_one()
    found = _caches(survey, rules, guard, wanted) if rules.of_caches else []
    chosen = {decision.item.name for decision in found if decision.goes}
    staying = [cache for cache in survey.caches if cache.name not in chosen]
    for kind, kept in KINDS.items():
        if kept.verdict is not None and rules.take(kept):
            found += [_judged(item, guard, kept.verdict(item, survey, staying)) for item in survey.of(kind)]
    return found


def _judged(item: RootItem, guard: Guard, verdict: tuple[bool, str]) -> Decision:
    """Returns the decision of a rule, unless somebody uses the item."""
    why = guard.reason(item) if verdict[0] else None
    return Decision(item=item, goes=verdict[0] and why is None, reason=why or verdict[1])


def _caches(survey: Survey, rules: Rules, guard: Guard, wanted: Wanted | None) -> list[Decision]:
    """Returns the decisions on caches and kept texts: those that the conditions leave, the oldest up to the bound."""
    items = survey.of(*(kind for kind, kept in KINDS.items() if kept.rule == "caches"))
    ledger, decisions = _Ledger(survey), {}
    for item in sorted(items, key=lambda item: (item.used_ns, item.name)):
        verdict = _verdict(item, rules, wanted)
        if verdict[0] and rules.max_bytes is not None and ledger.held_bytes <= rules.max_bytes:
            verdict = False, f"without it the bound of {human_bytes(rules.max_bytes)} holds already"
        decisions[item.name] = decision = _judged(item, guard, verdict)
        if decision.goes:
            ledger.take(item)
    return [decisions[item.name] for item in items]


def _verdict(item: RootItem, rules: Rules, wanted: Wanted | None) -> tuple[bool, str]:
    age_s = time.time() - item.used_ns / 1e9
    reasons = []
    if rules.unwanted:
        if wanted is None:
            raise ConfigError("--unwanted needs the configs to ask: --unwanted CONFIG..., or --configs DIR")
        if item.kind != "cache":
            return False, "configs share it: it goes by age and by size alone"
        if (why := wanted.reason(item.name)) is not None:
            return False, why
        reasons.append("no config that was named wants it")
    used = f"{'used' if item.is_used else 'made'} {ago(age_s)}"
    if rules.older_than_s is not None and age_s < rules.older_than_s:
        return False, used
    return True, ", ".join([*reasons, used])


class _Ledger:
    """The bytes that everything under a root still takes when some of it is gone."""

    def __init__(self, survey: Survey) -> None:
        files = {file.inode: file for file in survey.files() if file.kind == "file"}
        self.held_bytes = sum(file.size_bytes for file in files.values())
        self._left: dict[Inode, int] = {}
        for file in survey.files():
            self._left[file.inode] = self._left.get(file.inode, 0) + 1

    def take(self, item: RootItem) -> None:
        """Takes an item away; a file stays counted as long as another item has a link to it."""
        for file in item.files:
            self._left[file.inode] -= 1
            if not self._left[file.inode]:
                self.held_bytes -= file.size_bytes


def named(survey: Survey, names: Sequence[str], guard: Guard) -> list[Decision]:
    """Returns the decisions on items that were named. Raises ConfigError for a name that is not there."""
    items: Mapping[str, RootItem] = {item.name: item for item in survey.items}
    found = []
    for name in dict.fromkeys(names):
        if (item := items.get(name)) is None:
            raise ConfigError(
                f"{printable(name)}: nothing of that name is in {survey.root.place}; see: forebay cache ls "
                f"{from_here(survey.root.place)}"
            )
        if item.kept.rule is None and item.kept.verdict is None:
            what = item.problem or item.kept.words
            raise ConfigError(
                f"{printable(name)} is not removed by forebay: {printable(what)}; if it is to go, remove it yourself"
            )
        found.append(_judged(item, guard, (True, "named")))
    return found


def carried_out(
    survey: Survey, decisions: Sequence[Decision], guard: Guard, *, is_wanted: bool, progress: bool = False
) -> RemovalReport:
    """Removes what goes, if that is wanted, and returns the report; each item is looked at once more."""
    report = RemovalReport(survey=survey, decisions=decisions, is_done=is_wanted)
    going = [decision.item for decision in decisions if decision.goes] if is_wanted else []
    size_bytes = sum(item.sizes.size_bytes for item in going)
    with Progress(size_bytes, desc="remove", unit="B", is_shown=progress) as bar:
        for item in going:
            if (why := remove(item, guard)) is not None:
                report.stayed[item.name] = why
            bar.update(item.sizes.size_bytes)
    return report


def over(report: RemovalReport, max_bytes: int | None) -> int:
    """Returns how far what stays is above a bound."""
    if max_bytes is None:
        return 0
    ledger = _Ledger(report.survey)
    for item in report.going:
        ledger.take(item)
    return max(0, ledger.held_bytes - max_bytes)
