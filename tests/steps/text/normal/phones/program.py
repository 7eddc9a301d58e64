"""A program `espeak-ng` of the tests, for what the real one does seldom, and for machines that have none."""

from __future__ import annotations

import sys
from pathlib import Path

VOICES = """Pty Language       Age/Gender VoiceName          File                 Other Languages
 5  en-gb           --/M      English_(Great_Britain) gmw/en               (en 2)
 5  en-us           --/M      English_(America)  gmw/en-US            (en 3)
 5  fr-fr           --/M      French_(France)    roa/fr               (fr 5)
 5  hi              --/M      Hindi              inc/hi
 5  zz              --/M      Broken             art/zz
"""

_SOURCE = """#!{python} -S
import os, signal, sys, time
DATA, LOG = {data!r}, {log!r}
options = sys.argv[1:]
open(LOG, "a").write(" ".join(options) + "\\n")
if "--version" in options:
    print("eSpeak NG text-to-speech: {version}  Data at: " + DATA)
    sys.exit()
if "--voices" in options:
    print({voices!r}, end="")
    sys.exit()
voice = options[options.index("-v") + 1]
if voice not in ("en", "en-us", "en-gb", "fr", "hi"):
    print("Error: The specified espeak-ng voice does not exist.", file=sys.stderr)
    sys.exit(1)
{behaviour}
for line in sys.stdin.buffer.read().decode().split("\\n")[:-1]:
    if line == "[[t]]":
        print("t")
        continue
    line = misbehave(line) or line
    clauses = line.split(". ")
    for clause in clauses:
        words = "".join(c if c.isalnum() else " " for c in clause).split()
        print(" ".join("\\ue000".join("\\u02c8" + c if i == 0 else c for i, c in enumerate(w)) for w in words))
"""


def fake(folder: Path, behaviour: str = "", *, version: str = "1.52", data: bytes = b"phones") -> Path:
    """Writes a program `espeak-ng` into a folder; returns the log of its calls.

    A letter is a phone, the first of a word is stressed, and a clause is a line, also where it says nothing.
    behaviour: the body of `misbehave(line)`, called for every line that is no marker; what it returns is
    spoken instead.
    """
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "phontab").write_bytes(data)
    log = folder / "calls.log"
    body = "\n".join(f"    {line}" for line in (behaviour or "pass").splitlines())
    program = folder / "espeak-ng"
    program.write_text(
        _SOURCE.format(
            python=sys.executable,
            data=str(folder / "data"),
            log=str(log),
            version=version,
            voices=VOICES,
            behaviour=f"def misbehave(line):\n{body}",
        )
    )
    program.chmod(0o755)
    return log
