"""Phones by the program `espeak-ng`, in processes of its own.

The program is GPL-3: forebay neither holds it, links it nor needs it. A process gets a batch of lines and ends. In a
batch every line stands between two markers, a phone that the program gives back as it is: the program writes a line
for every clause that it sees, and a clause that it sees elsewhere than we do must not shift its neighbours.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from forebay.errors import BuildError, ConfigError
from forebay.steps.text.normal.normal_step import Problem
from forebay.steps.text.normal.written_phones import Words

PROGRAM = "espeak-ng"
_BETWEEN = "\ue000"
"""What the program writes between phones: a character of nobody's."""
_MARKER = "[[t]]"
"""The phone t, or what a voice has for it. The program speaks no text so: a letter by itself is said by its name."""
_SWITCH = re.compile(r"\([a-z][a-z0-9-]*\)", re.IGNORECASE)
"""What the program writes where it goes over to another language: (en)."""
_LINE_BYTES = 900
"""The program reads a line in pieces of 999 bytes."""
_NO_NUMBERS = frozenset({"ar", "kl"})
"""Voices with which the program (1.51) speaks a number otherwise from run to run, or dies at it."""
_BATCH_LINES = 256
_BATCH_BYTES = 64 << 10
_TIMEOUT_S, _TIMEOUT_A_LINE_S = 30.0, 0.25
_EAST_ASIAN = re.compile("[\u3005-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_NAMED = ("一龍", "ーゞ")
"""Letters for which a voice that cannot read them says `Chinese letter`, `Japanese letter`: the same for both."""
_STRESS = re.compile("[ˈˌ]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_STOPPED = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that somebody sends, or the kernel where memory ends: no text's fault."""


class _FaultError(Exception):
    """A process did not give what it should. is_lasting: a text may be the reason; False where the machine is."""

    def __init__(self, message: str, *, is_lasting: bool) -> None:
        super().__init__(message)
        self.is_lasting = is_lasting


@dataclass(frozen=True, slots=True)
class Voices:
    """Which voice speaks a language. installed: lower case code or name of a language -> what the program calls it."""

    chosen: Mapping[str, str]
    default: str
    installed: Mapping[str, str]

    def of(self, language: str) -> str | Problem:
        """Returns the voice of a language as manifests write it (`en`, `en-US`, `English`)."""
        wanted = language.strip().lower().replace("_", "-")
        if not wanted:
            message = "the language is not known; give it, or set voice in text.phones"
            return self.default or Problem("unknown_language", message)
        names = (wanted, wanted.partition("-")[0], self.installed.get(wanted, ""))
        for voices in (self.chosen, self.installed):
            if found := next((voices[name] for name in names if name in voices), None):
                return found
        message = f"espeak-ng has no voice for the language {language!r}; name one in text.phones: voices = {{...}}"
        return Problem("unknown_language", message)


class Espeak:
    """The program that is installed here. timeout_s: how long a process may take for one line."""

    def __init__(self, *, timeout_s: float = _TIMEOUT_S) -> None:
        """Looks the program up. Raises ConfigError where there is none."""
        self.timeout_s = timeout_s
        found = shutil.which(PROGRAM)
        if found is None:
            raise ConfigError(
                f"text.phones: the program {PROGRAM} is not on PATH; install it (Debian, Ubuntu: "
                f'apt-get install {PROGRAM}; macOS: brew install {PROGRAM}), or set backend = "lexicon"',
                code="FB118",
            )
        self.program = found
        self._speaks: set[str] = set()
        self._names: dict[str, frozenset[str]] = {}

    def voices(self, chosen: Mapping[str, str], default: str) -> Voices:
        """Returns the voices of a config, looked up here. Raises ConfigError for one that the program has not."""
        named = {f"voices.{language}": voice for language, voice in chosen.items()}
        for setting, voice in {**named, **({"voice": default} if default else {})}.items():
            if fault := self._fault(voice):
                raise ConfigError(
                    f"text.phones.{setting}: {PROGRAM} cannot speak as {voice!r}: {fault}; "
                    f"{PROGRAM} --voices lists the voices",
                    code="FB118",
                )
        lowered = {language.lower().replace("_", "-"): voice for language, voice in chosen.items()}
        return Voices(lowered, default, installed_voices(self._asked(["--voices"])))

    def has(self, voice: str) -> bool:
        """Says whether the program can speak with a voice: it lists some whose data are not there.

        Raises BuildError where the program does not work at all.
        """
        if self._fault(voice) is None:
            return True
        self._asked(["--voices"])
        return False

    def _fault(self, voice: str) -> str | None:
        """Returns why the program cannot speak with a voice, None where it can; asks it once."""
        if voice not in self._speaks:
            try:
                self._run([_MARKER], voice, self.timeout_s)
            except _FaultError as err:
                return str(err)
            self._speaks.add(voice)
        return None

    def _asked(self, options: Sequence[str]) -> str:
        """Returns what the program answers to options. Raises BuildError where it does not answer."""
        try:
            return output_of(self.program, options, "", self.timeout_s)
        except _FaultError as err:
            raise self._broken(err) from err

    def _broken(self, fault: Exception) -> BuildError:
        return BuildError(f"{PROGRAM} does not work here: {fault}; try: echo hello | {self.program} -q -x")

    def speak(self, lines: Sequence[str], voice: str) -> list[Words | Problem]:
        """Returns the phones of every line, in their order. A line's phones depend on that line alone.

        Problems: `phones_failed`, the program ends badly at a line; `unknown_letters`, it cannot read the line.
        Raises BuildError where the program does not work at all, or does not come to an end.
        """
        pieces = [fitting(line) for line in lines]
        flat = [piece for found in pieces for piece in found]
        spoken = iter([result for batch in _batches(flat) for result in self._spoken(batch, voice)])
        results = [all_words([next(spoken) for _ in found]) for found in pieces]
        return [self._read(line, found, voice) for line, found in zip(lines, results, strict=True)]

    def _read(self, line: str, found: Words | Problem, voice: str) -> Words | Problem:
        """Returns the phones of a line, or why they are none of it."""
        if voice.rpartition("/")[2].partition("+")[0] in _NO_NUMBERS and any(map(str.isdigit, line)):
            message = (
                f"espeak-ng (voice {voice}) does not speak the numbers of {line[:80]!r} rightly; write them as words"
            )
            return Problem("phones_failed", message)
        if isinstance(found, Problem) or not _EAST_ASIAN.search(line):
            return found
        if voice not in self._names:
            pairs = zip(*[iter(self._spoken("".join(_NAMED), voice))] * 2, strict=True)
            said = [(_unstressed(one), _unstressed(other)) for one, other in pairs]
            self._names[voice] = frozenset(name for one, other in said if one == other for name in one)
        if self._names[voice].isdisjoint(_unstressed(found)):
            return found
        return Problem(
            "unknown_letters",
            f"espeak-ng (voice {voice}) cannot read some letters of {line[:80]!r} and would name them (Chinese "
            "letter); write them in letters that it reads (kana), or use a lexicon",
        )

    def found(self) -> str:
        """Returns the digest of the program's version and of its data: what phones depend on beside the texts."""
        return _program_digest(self.program, os.environ.get("ESPEAK_DATA_PATH", ""))

    def _spoken(self, lines: Sequence[str], voice: str) -> list[Words | Problem]:
        timeout_s = self.timeout_s + _TIMEOUT_A_LINE_S * len(lines)
        marked = [_MARKER, *(part for line in lines for part in (line, _MARKER))]
        try:
            return [_words(found) for found in between_markers(self._run(marked, voice, timeout_s), len(lines))]
        except _FaultError as fault:
            if len(lines) == 1:
                return [self._again(lines[0], voice, fault)]
        half = len(lines) // 2
        return [*self._spoken(lines[:half], voice), *self._spoken(lines[half:], voice)]

    def _again(self, line: str, voice: str, first: _FaultError) -> Words | Problem:
        """Returns the phones of a line at which a process went wrong, without markers: all that is said."""
        try:
            return _words(self._run([line], voice, self.timeout_s))
        except _FaultError as fault:
            where = f"twice at the text {line[:80]!r} (voice {voice}): {first}, then {fault}"
            try:
                self._run([_MARKER], voice, self.timeout_s)
            except _FaultError as err:
                raise self._broken(err) from err
            if fault.is_lasting and first.is_lasting:
                return Problem("phones_failed", f"{PROGRAM} failed {where}")
            raise BuildError(
                f"{PROGRAM} failed {where}; what was finished is kept: run the command again, or leave the text out"
            ) from fault

    def _run(self, lines: Sequence[str], voice: str, timeout_s: float) -> list[str]:
        """Returns the lines that a process writes for lines; raises _FaultError where it did not end as it should."""
        text = "".join(f"{line}\n" for line in lines)
        # Without a text and --stdin the program reads line by line: one call, and one state, a line.
        options = ["-q", "-b", "1", "--ipa", f"--sep={_BETWEEN}", "-v", voice]
        return output_of(self.program, options, text, timeout_s).split("\n")[:-1]


def output_of(program: str, options: Sequence[str], text: str, timeout_s: float) -> str:
    """Returns what a process writes; raises _FaultError where it did not end as it should."""
    try:
        done = subprocess.run(
            [program, *options],
            input=text.encode("utf-8"),
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
    except subprocess.TimeoutExpired as err:
        raise _FaultError(f"it did not end within {timeout_s:g} s", is_lasting=False) from err
    except OSError as err:
        raise _FaultError(f"{program} cannot be run: {err.strerror}", is_lasting=False) from err
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().replace("\n", "; ")[:200]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        lasting = -done.returncode not in _STOPPED
        raise _FaultError(f"it ended with {how}{': ' + said if said else ''}", is_lasting=lasting)
    try:
        return done.stdout.decode("utf-8")
    except UnicodeDecodeError as err:
        raise _FaultError(f"it wrote what is not UTF-8 (byte {err.start})", is_lasting=True) from err


def installed_voices(table: str) -> dict[str, str]:
    """Returns the languages of `espeak-ng --voices`, lower case code or English name -> what `-v` takes.

    A language of several voices (en-gb, en-us, ...) is its plain code (en): the program then takes the one it prefers.
    """
    found: dict[str, str] = {}
    names: dict[str, str] = {}
    for line in table.splitlines()[1:]:
        cells = line.split()
        if len(cells) < 5:
            continue
        code, name = cells[1].lower(), cells[3].lower()
        others = [other.lower() for other in re.findall(r"\(([\w-]+)\s+\d+\)", line)]
        for other in (code, code.partition("-")[0], *others):
            found.setdefault(other, other)
        names.setdefault(name.partition("_(")[0].replace("_", " "), code.partition("-")[0])
    return {**names, **found}


def between_markers(lines: Sequence[str], count: int) -> list[list[str]]:
    """Returns what a process wrote for each of `count` lines that stood between markers.

    Raises _FaultError where there are not count + 1 markers: a line was spoken like a marker, or output is missing.
    """
    marker = lines[0] if lines else ""
    groups: list[list[str]] = []
    for line in lines:
        if line == marker:
            groups.append([])
        else:
            groups[-1].append(line)
    if not marker or len(groups) != count + 1 or groups[-1]:
        raise _FaultError(f"it wrote {max(len(groups) - 1, 0)} answers to {count} lines", is_lasting=True)
    return groups[:-1]


def fitting(text: str) -> list[str]:
    """Returns a text as lines that the program reads whole, cut at spaces where it is too long for one.

    Control characters become spaces, as they are line ends and commands to the program; `[[`, with which it is told
    phones, becomes `[ [`.
    """
    line = _CONTROL.sub(" ", text).strip()
    while "[[" in line:
        line = line.replace("[[", "[ [")
    pieces = []
    while len(line.encode()) > _LINE_BYTES:
        room = len(line.encode()[:_LINE_BYTES].decode("utf-8", "ignore"))
        cut = line.rfind(" ", 1, room + 1)
        cut = room if cut < 1 else cut
        pieces.append(line[:cut].strip())
        line = line[cut:].strip()
    return [*pieces, line] if line else pieces


def _batches(lines: Sequence[str]) -> Iterable[Sequence[str]]:
    start = size = 0
    for i, line in enumerate(lines):
        size += len(line.encode())
        if i + 1 - start == _BATCH_LINES or size >= _BATCH_BYTES or i + 1 == len(lines):
            yield lines[start : i + 1]
            start, size = i + 1, 0


def _words(lines: Iterable[str]) -> Words:
    """Returns the phones of every word in lines of the program."""
    words = [word for line in lines for word in _SWITCH.sub("", line).split()]
    phones = [tuple(filter(None, word.split(_BETWEEN))) for word in words]
    return [found for found in phones if found]


def _unstressed(found: Words | Problem) -> tuple[str, ...]:
    """Returns words without their stress, which depends on those around them; none for a problem."""
    return () if isinstance(found, Problem) else tuple(_STRESS.sub("", _BETWEEN.join(word)) for word in found)


def all_words(results: Sequence[Words | Problem]) -> Words | Problem:
    """Returns the words of parts of a text one behind the other, or the first problem."""
    found = next((result for result in results if isinstance(result, Problem)), None)
    return found or [word for result in results if not isinstance(result, Problem) for word in result]


@functools.cache
def _program_digest(program: str, data: str) -> str:  # noqa: ARG001
    try:
        said = output_of(program, ["--version"], "", _TIMEOUT_S).strip()
    except _FaultError as err:
        raise ConfigError(f"text.phones: {program} --version: {err}", code="FB118") from err
    version, _, folder = said.partition("Data at:")
    state = xxhash.xxh3_128(version.strip().encode())
    root = Path(folder.strip())
    for path in sorted(root.rglob("*")) if (root / "phontab").is_file() else ():
        if path.is_file():
            content = path.read_bytes()
            state.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
            state.update(content)
    return state.hexdigest()
