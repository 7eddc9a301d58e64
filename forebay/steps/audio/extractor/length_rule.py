"""How many frames clips have, as a rule in integers that a few questions find: frames = step * ((n + shift) // hop)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

_MAX_RULES = 1 << 14
_MAX_QUESTIONS = 24


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Clips of n samples, n at least 1, have max(least, step * ((n + shift) // hop)) frames."""

    step: int
    shift: int
    hop: int
    least: int = 0

    def frames(self, num_samples: npt.NDArray[np.integer]) -> Integers:
        """Returns the frames of clips, int64."""
        found = self.step * ((np.asarray(num_samples, np.int64) + self.shift) // self.hop)
        return np.maximum(found, self.least)


def length_rule(
    lengths: Sequence[tuple[int, int]], ask: Callable[[int], int | None], *, check: Sequence[int]
) -> LengthRule | None:
    """Returns the one rule that answers all questions; None where no rule does, or several.

    lengths: (samples, frames) of clips, by samples. ask: returns the frames of a clip of so many samples, None where
    there are none. check: samples of clips that are asked for at last, short ones too.
    """
    rules = _possible(lengths)
    first, last = lengths[0][0], lengths[-1][0]
    for _ in range(_MAX_QUESTIONS):
        if len(rules) < 2:
            break
        asked = _splitting(rules, first, last)
        answer = None if asked is None else ask(asked)
        if asked is None or answer is None:
            return None
        rules = rules[_answers(rules, asked) == answer]
    if len(rules) != 1:
        return None
    step, shift, hop = rules[0].tolist()
    return _checked(LengthRule(step, shift, hop), ask, check)


def _checked(rule: LengthRule, ask: Callable[[int], int | None], check: Sequence[int]) -> LengthRule | None:
    least = 0
    for samples in sorted(check):
        found, said = ask(samples), int(rule.frames(np.array(samples)))
        if found is None or found == max(said, least):
            continue
        if found < said or least:
            return None
        least = found  # of the shortest clips, which some extractors pad
    return LengthRule(rule.step, rule.shift, rule.hop, least)


def _possible(lengths: Sequence[tuple[int, int]]) -> Integers:
    """Returns every rule [step, shift, hop] that answers for these clips, int64 [num_rules, 3]."""
    samples, frames = (np.array(column, np.int64) for column in zip(*lengths, strict=True))
    step = math.gcd(*frames.tolist())
    if frames[0] == frames[-1] or step == 0:
        return np.zeros((0, 3), np.int64)
    units = frames // step
    slope = (samples[-1] - samples[0]) / (units[-1] - units[0])
    slack = 2 * slope / (units[-1] - units[0]) + 1e-9
    hops = range(max(1, math.ceil(slope - slack)), math.floor(slope + slack) + 1)
    if step in hops:  # samples that are padded to a multiple
        hops = range(step, step + 1)
    found: list[Integers] = [np.zeros((0, 3), np.int64)]
    for hop in hops:
        low, high = int((units * hop - samples).max()), int((units * hop - samples).min()) + hop
        if high - low + sum(map(len, found)) > _MAX_RULES:
            return found[0]
        shifts = np.arange(low, high)
        found.append(np.stack([np.full_like(shifts, step), shifts, np.full_like(shifts, hop)], axis=1))
    return np.concatenate(found)


def _answers(rules: Integers, samples: int) -> Integers:
    answers: Integers = rules[:, 0] * ((samples + rules[:, 1]) // rules[:, 2])
    return answers


def _splitting(rules: Integers, first: int, last: int) -> int | None:
    """Returns the samples of a clip for which about half of the rules answer the same; None where all agree."""
    middle = rules[len(rules) // 2]
    # Where the rule in the middle has a new frame, some others have one more.
    edge = int((-middle[1]) % middle[2])
    hop = int(middle[2])
    places = [first + (edge - first) % hop, (first + last) // 2, last - (last - edge) % hop]
    tried = [place for n in places for place in (n, n - 1) if place >= 1]
    best, most = None, len(rules)
    for place in tried:
        _, counts = np.unique(_answers(rules, place), return_counts=True)
        if len(counts) > 1 and counts.max() < most:
            best, most = place, int(counts.max())
    return best
