"""The program espeak-ng: batches, voices, faults. A fake one never skips; the real one is its own reference."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import BuildError, ConfigError
from forebay.steps.text.normal import espeak
from forebay.steps.text.normal.espeak import Espeak, between_markers, fitting, installed_voices
from forebay.steps.text.normal.normal_step import Problem, Runner
from forebay.steps.text.normal.phones import EspeakPhones, LexiconPhones
from tests.steps.text.normal.phones.program import VOICES, fake

REAL = shutil.which("espeak-ng")
needs_program = pytest.mark.skipif(REAL is None, reason="the program espeak-ng is not installed")
TEXTS = ["Hello, world", "one. two. three", "...", "t", "[[t]]", "a\nb\x01c", "", "x" * 950 + " y", "one"]


def plain(**settings: Any) -> Runner:
    """Returns the step, opened, that writes phones without separators, as the program does."""
    return EspeakPhones(separator="", word_separator=" ", **settings).open()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH for fakes; a first one stands in it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    fake(tmp_path)
    return tmp_path


def test_a_text_has_the_phones_that_it_has_alone(program: Path) -> None:
    run = plain(voice="en")
    alone = [run([text], [""])[0] for text in TEXTS]
    assert run(TEXTS, [""] * len(TEXTS)) == alone
    assert alone[1] == "ˈone ˈtwo ˈthree"  # three clauses, three lines of the program
    assert alone[4] == "ˈt"  # not told phones
    assert alone[5] == "ˈa ˈb ˈc"
    assert [alone[2], alone[6]] == [Problem("no_phones", f"nothing of {text!r} is spoken") for text in ("...", "")]


def test_a_batch_is_one_process_a_voice(program: Path) -> None:
    log = program / "calls.log"
    run = EspeakPhones(voices=(("en", "en-us"),)).open()
    log.unlink()
    found = run(["a b", "c", "d", "e"] * 100, ["en", "hi", "English", "fr-CA"] * 100)
    assert found[:4] == ["ˈa | ˈb", "ˈc", "ˈd", "ˈe"]
    calls = log.read_text().splitlines()
    voices = [call.rpartition(" ")[2] for call in calls]
    # A voice that the config does not name is tried first.
    assert sorted(voices) == ["en-us", "fr", "fr", "hi", "hi"]


@pytest.mark.parametrize(
    ("language", "voice"),
    [("en", "en-us"), ("EN_us", "en-us"), ("en-GB", "en-us"), ("English", "en-us"), ("fr_CA", "fr"), ("hindi", "hi"),
     ("", "en-gb"), (" ", "en-gb")],
)  # fmt: skip
def test_a_language_has_the_voice_of_its_code_or_name(program: Path, language: str, voice: str) -> None:
    assert Espeak().voices({"en": "en-us"}, "en-gb").of(language) == voice


def test_languages_that_nobody_speaks_cost_their_texts(program: Path) -> None:
    run = EspeakPhones().open()
    unknown, none, broken, good = run(["a"] * 4, ["tlh", "", "zz", "en"])
    assert good == "ˈa"
    assert [part.reason for part in (unknown, none, broken) if isinstance(part, Problem)] == ["unknown_language"] * 3
    assert "no voice for the language 'tlh'" in str(unknown)
    assert "the language is not known" in str(none)
    assert "cannot speak 'zz'" in str(broken)


def test_a_voice_that_is_not_there_is_refused_before_anything_runs(program: Path) -> None:
    for step, setting in (
        (EspeakPhones(voices=(("en", "klingon"),)), "voices.en"),
        (EspeakPhones(voice="xx"), "voice"),
    ):
        with pytest.raises(ConfigError, match=rf"text\.phones\.{setting}: .*voice does not exist.*--voices lists"):
            step.open()


def test_without_the_program_the_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "x.tsv").write_text("a\tb\n")
    step = EspeakPhones()
    assert step.identity()["voices"] == ()  # keys do not ask for it
    with pytest.raises(ConfigError, match=r"espeak-ng is not on PATH; install it .*apt-get install espeak-ng"):
        step.open()
    lexicon = LexiconPhones.of_settings({"lexicon": "x.tsv", "fallback": "espeak"}, tmp_path)
    with pytest.raises(ConfigError, match=r"espeak-ng is not on PATH"):
        lexicon.open()


def test_words_that_a_lexicon_lacks_are_spoken(program: Path) -> None:
    (program / "x.tsv").write_text("hello\thh ah l ow\n")
    step = LexiconPhones.of_settings({"lexicon": "x.tsv", "fallback": "espeak", "voice": "en"}, program)
    assert step.open()(["hello wo", "wo"], ["", "tlh"]) == [
        "hh ah l ow | ˈw o",
        Problem("unknown_language", "espeak-ng has no voice for the language 'tlh'; name one in text.phones: voices = "
                "{...}"),
    ]  # fmt: skip
    assert step.found().keys() == {"espeak"}


def test_a_text_at_which_the_program_dies_costs_itself_alone(program: Path) -> None:
    log = fake(program, 'if "die" in line: os.kill(os.getpid(), signal.SIGSEGV)')
    texts = [f"w{i}" for i in range(40)]
    texts[17] = "die now"
    found = EspeakPhones(voice="en", separator="").open()(texts, [""] * 40)
    assert [i for i, part in enumerate(found) if isinstance(part, Problem)] == [17]
    assert found[16] == "ˈw16"
    assert found[17] == Problem(
        "phones_failed",
        "espeak-ng failed twice at the text 'die now' (voice en): it ended with signal 11, then it ended with "
        "signal 11",
    )
    assert len(log.read_text().splitlines()) < 20  # halves, not one by one


def test_a_process_that_dies_once_is_started_again(program: Path) -> None:
    mark = program / "died"
    behaviour = f"if not os.path.exists({str(mark)!r}):\n    open({str(mark)!r}, 'w'); os.kill(os.getpid(), 9)"
    fake(program, behaviour)
    assert plain(voice="en")(["one"], [""]) == ["ˈone"]
    mark.unlink()
    assert plain(voice="en")(["one", "two"], ["", ""]) == ["ˈone", "ˈtwo"]


def test_a_program_that_hangs_is_ended_and_stops_the_build(program: Path) -> None:
    fake(program, 'if "wait" in line: time.sleep(60)')
    with pytest.raises(
        BuildError, match=r"failed twice at the text 'wait' .*did not end within 0\.\d+ s.*run the command"
    ):
        Espeak(timeout_s=0.5).speak(["wait"], "en")


def test_a_program_that_stopped_working_stops_the_build(program: Path) -> None:
    step = EspeakPhones(voice="en")
    run = step.open()
    (program / "espeak-ng").write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
    with pytest.raises(BuildError, match=r"does not work here: it ended with exit code 3: no memory; try: echo hello"):
        run(["a", "b"], ["", ""])
    with pytest.raises(BuildError, match=r"does not work here"):
        run(["a"], ["hi"])  # not: nobody speaks Hindi


@pytest.mark.parametrize("behaviour", ['print("more")', "sys.exit(0)", 'print("t")'])
def test_answers_that_do_not_fit_are_asked_for_alone(program: Path, behaviour: str) -> None:
    fake(program, behaviour=f'if "odd" in line:\n    {behaviour}')
    found = plain(voice="en")(["one", "odd", "two"], [""] * 3)
    assert [found[0], found[2]] == ["ˈone", "ˈtwo"]
    assert found[1] in ("more ˈodd", "t ˈodd", Problem("no_phones", "nothing of 'odd' is spoken"))


def test_answers_stand_between_markers() -> None:
    assert between_markers(["t", "a", "t", "b", "c", "t", "", "t"], 3) == [["a"], ["b", "c"], [""]]
    for lines in ([], ["t"], ["t", "a"], ["t", "a", "t", "t"], ["t", "a", "t", "b"], ["", "a", ""]):
        with pytest.raises(espeak._FaultError, match=r"answers to 1 lines"):
            between_markers(lines, 1)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=2000))
def test_lines_are_short_and_hold_no_commands(text: str) -> None:
    lines = fitting(text)
    assert all(len(line.encode()) <= 900 and "[[" not in line and line.isspace() is False for line in lines)
    assert not set("".join(lines)) & set(map(chr, [*range(32), 127]))
    assert "".join("".join(lines).split()) == "".join(espeak._CONTROL.sub(" ", text).split())


def test_long_texts_are_cut_at_spaces() -> None:
    assert fitting("ab " * 400)[0] == ("ab " * 300).strip()
    assert [len(line) for line in fitting("語" * 700)] == [300, 300, 100]


def test_voices_of_the_table_are_found_by_code_and_name() -> None:
    found = installed_voices(VOICES)
    wanted = {"en": "en", "en-us": "en-us", "fr": "fr", "fr-fr": "fr-fr", "hindi": "hi", "english": "en", "hi": "hi"}
    assert {name: found[name] for name in wanted} == wanted
    assert installed_voices("") == {}


def test_the_store_of_texts_knows_the_program_by_version_and_data(program: Path) -> None:
    def digest(**changed: object) -> object:
        espeak._program_digest.cache_clear()
        fake(program, **changed)  # type: ignore[arg-type]
        return EspeakPhones().found()["espeak"]

    first = digest()
    assert digest() == first
    assert len({first, digest(version="1.53"), digest(data=b"other"), digest(version="1.53", data=b"other")}) == 4


def _alone(text: str, voice: str, *more: str) -> list[str]:
    """Returns the lines of the real program for one text."""
    made = subprocess.run(
        ["espeak-ng", "-q", "-b", "1", "--ipa", *more, "-v", voice],
        input=f"{text}\n".encode(),
        capture_output=True,
        check=True,
    )
    return made.stdout.decode().split()


REAL_TEXTS = {
    "en-us": [
        "Hello, world!", "Mr. Smith paid 3.14 dollars at 10:30; J. R. came, too...", "Wait - what?! (No.)", "t", "!?",
        "She said \"stop.\" Now", "the U.S. army", "😀 smile", "A/B c++ x|y 5 000", "Well-known don’t e.g. this",
    ],
    "de": ["Guten Tag, Herr Müller! Wie geht's?", "Das kostet 1.000,50 Euro.", "Zug um Zug"],
    "fr": ["Bonjour ! Ça va ?", "L'été, c'est « beau »."],
    "hi": ["नमस्ते दुनिया। आप कैसे हैं?", "मैं hello कहता हूँ"],
    "ru": ["Пожалуйста, подождите."],
    "cmn": ["你好，世界。今天天气很好"],
    "ar": ["سبعة تسعون", "العربية، مع عام"],
}  # fmt: skip


@needs_program
@pytest.mark.parametrize("voice", REAL_TEXTS)
def test_the_real_program_says_in_a_batch_what_it_says_alone(voice: str) -> None:
    texts = REAL_TEXTS[voice]
    found = plain(voice=voice)(texts, [""] * len(texts))
    for text, phones in zip(texts, found, strict=True):
        alone = espeak._SWITCH.sub("", " ".join(_alone(text, voice))).split()
        assert (phones if isinstance(phones, str) else "") == " ".join(alone)
        assert isinstance(phones, str) == bool(alone)


@needs_program
def test_the_real_program_ties_the_letters_that_are_tied_here() -> None:
    texts = ["Cheese day judge joy now", "chose a huge voice, right away"]
    found = plain(voice="en-us", ties=True)(texts, ["", ""])
    assert found == [" ".join(_alone(text, "en-us", "--tie=\u0361")) for text in texts]


@needs_program
def test_the_real_program_keeps_its_phones_where_marks_are_kept() -> None:
    texts = ["Hello, world! How are you?", "He came; she went."]
    kept = plain(voice="en-us", punctuation="keep")(texts, ["", ""])
    assert kept == ["həlˈoʊ, wˈɜːld! hˈaʊ ɑːɹ juː?", "hiː kˈeɪm; ʃiː wˈɛnt."]


def test_letters_that_a_voice_names_instead_of_reading_cost_the_text(program: Path) -> None:
    fake(program, 'if any(c in line for c in "一龍字"): return "kanji"')
    found = plain(voice="en")(["a 字 b", "かな ー", "a b"], [""] * 3)
    assert isinstance(found[0], Problem)
    assert found[0].reason == "unknown_letters"
    assert found[1:] == ["ˈかな ˈー", "ˈa ˈb"]


@needs_program
@pytest.mark.parametrize("voice", ["ar", "kl", "sem/ar", "ar+f3"])
def test_the_real_program_speaks_no_numbers_where_it_does_not_know_them(voice: str) -> None:
    wrong, right = plain(voice=voice)(["3 ٩٤", "imaq"], ["", ""])
    assert isinstance(wrong, Problem)
    assert (wrong.reason, "write them as words" in wrong.message) == ("phones_failed", True)
    assert isinstance(right, str)


@needs_program
def test_the_real_program_does_not_read_kanji() -> None:
    found = plain(voices=(("ja", "ja"), ("zh", "cmn")))(
        ["今日は、さむい", "さむい", "你好", "今日"], ["ja", "ja", "zh", "de"]
    )
    assert [isinstance(part, Problem) for part in found] == [True, False, False, True]


@needs_program
def test_the_real_program_is_told_nothing_by_a_text(tmp_path: Path) -> None:
    run = plain(voice="en-us")
    assert run(["[[h@l'oU]]", "a [[t]] b", "--version"], [""] * 3) == [
        run([text], [""])[0] for text in ("[ [h@l'oU] ]", "a t b", "--version")
    ]
    with pytest.raises(ConfigError, match=r"text\.phones\.voice: espeak-ng cannot speak as 'nonesuch'"):
        EspeakPhones(voice="nonesuch").open()


@needs_program
@settings(max_examples=10)
@given(texts=st.lists(st.text(alphabet="abt .,!?'-\"()[]1é\n", max_size=12), min_size=2, max_size=5))
def test_neighbours_change_nothing(texts: list[str]) -> None:
    run = EspeakPhones(voice="en-us").open()
    assert run(texts, [""] * len(texts)) == [run([text], [""])[0] for text in texts]
