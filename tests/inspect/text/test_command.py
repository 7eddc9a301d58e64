"""`forebay text` on the demo's recordings and on texts of strangers, as a user runs it."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.here_pool import HerePool
from forebay.inspect.text_command import print_view, report_texts, view_sample, view_text
from forebay.steps.recipe import load_config, recipe_of
from forebay.steps.text.transcript import TextEncoder, Transcript
from forebay.visible import VisibleStream
from tests.commands import run, run_json
from tests.given_features import given_config, recordings, save
from tests.strategies import wicked_texts
from tests.text_corpus import ROOT, text_config, write_texts

DEMO = ROOT / "configs" / "demo_speech.toml"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are listed in the test's own process."""
    monkeypatch.setattr("forebay.inspect.text_command.Pool", HerePool)


@pytest.fixture
def demo(tmp_path: Path) -> list[object]:
    """The demo's config, with an index of its own."""
    return [DEMO, "--cache-root", tmp_path, "--no-progress"]


def texts(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> list[object]:
    """A config of texts without audio, as arguments."""
    text_config(folder, rows=[])
    write_texts(folder / "texts.jsonl", rows)
    return [folder / "texts.toml", "--no-progress", *(part for text in overrides for part in ("--set", text))]


GOLDEN = """\
sample ru_digits_16: train-00000.tar, row 3 of the listing
language      ru
text          шестнадцать
nfkc          unchanged
tokens        14, the first 4 given; 13 label tokens, text.max_label_tokens is 448
id              token                  what it is
  701           <|startoftranscript|>  prefix, control
  706           <|ru|>                 prefix, control
  803           <|transcribe|>         prefix, control
  807           <|notimestamps|>       prefix, control
  332           "ш"                    label
  257           "е"                    label
  393           "ст"                   label
  267           "н"                    label
  274           bytes D0 B0 D0         label, piece of a character
  112           bytes B4               label, piece of a character
  141           bytes D1               label, piece of a character
  228           bytes 86               label, piece of a character
  581           "ать"                  label
  700           <|endoftext|>          label, control
"""


def test_a_sample_is_shown_by_its_row_and_by_its_id(capsys: pytest.CaptureFixture[str], demo: list[object]) -> None:
    code, out, err = run(capsys, "text", *demo, "--sample", "ru_digits_16")
    assert (code, err) == (0, "")
    assert out == GOLDEN
    assert run(capsys, "text", *demo, "--sample", "3") == (0, out, "")


def test_the_report_of_the_demo_is_that_of_plain_loops(capsys: pytest.CaptureFixture[str], demo: list[object]) -> None:
    rows = pq.read_table(ROOT / "demo" / "speech" / "train.parquet").to_pylist()
    config = load_config(DEMO)
    step = recipe_of(config).text.step
    assert isinstance(step, Transcript)
    assert config.text is not None
    encoder: TextEncoder = step.opened(Path(config.text.tokenizer))
    tokens: dict[str, Counter[str]] = defaultdict(Counter)
    labels = {}
    vocabulary = encoder.vocabulary
    for row in rows:
        ids = encoder.encode(row["transcript"], row["language"], None, sample_id="s")["input_ids"].tolist()
        labels[row["sample_id"]] = len(ids) - 1
        own = [i for i in ids if i not in vocabulary.control_ids]
        is_piece = ["\ufffd" in vocabulary.tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in own]
        tokens[row["language"]].update(texts=1, tokens=len(own), pieces=sum(is_piece))
        tokens[row["language"]].update(characters=len(" ".join(row["transcript"].split())))
    found = run_json(capsys, "text", *demo)
    assert found["num_texts"] == len(rows) == 52
    assert {each["language"]: each for each in found["languages"]}.keys() == tokens.keys()
    for each in found["languages"]:
        wanted = tokens[each["language"]]
        assert (each["texts"], each["characters"], each["tokens"]) == tuple(
            wanted[name] for name in ("texts", "characters", "tokens")
        )
        assert each["pieces_of_characters"] == wanted["pieces"]
        assert each["tokens_per_character"] == pytest.approx(wanted["tokens"] / wanted["characters"])
        assert each["unknown"] == each["byte_fallback"] == 0
    assert {each["sample_id"]: each["label_tokens"] for each in found["labels"]["longest"]} == labels
    assert found["labels"]["longest"][0]["label_tokens"] == max(labels.values())
    (step,) = found["steps"]
    changed = [row for row in rows if " ".join(row["transcript"].split()) != row["transcript"]]
    assert (step["step"], step["texts"], step["added"]) == ("nfkc", len(changed), 0)
    assert step["removed"] == sum(len(r["transcript"]) - len(" ".join(r["transcript"].split())) for r in changed)
    assert found["pace"]["durations"] == "by the manifest"
    assert (found["failures"], found["repeated"]["num_texts"], found["is_part"]) == ([], 0, False)


def test_the_lines_of_the_report_say_the_same(capsys: pytest.CaptureFixture[str], demo: list[object]) -> None:
    code, out, _ = run(capsys, "text", *demo, "--max-samples", 20)
    assert code == 0
    assert "demo_speech.toml: the first 20 texts, read from the raw data" in " ".join(out.split())
    for head in (
        "steps ",
        "languages ",
        "longest labels (text.max_label_tokens is 448)",
        "characters a second, medians",
    ):
        assert any(line.startswith(head) for line in out.splitlines()), head
    assert "repeated texts: none" in out


def test_a_transcript_of_another_recording_is_found(tmp_path: Path) -> None:
    """Forty recordings of a table whose text fits, and one that got the text of a longer one."""
    import numpy as np
    import soundfile

    words = ["one two three four five six"] * 40 + ["one two three four five six " * 12]
    lines = ["path,text"]
    for number, text in enumerate(words):
        seconds = 2.0 + 0.02 * (number % 7)
        soundfile.write(tmp_path / f"{number}.wav", np.zeros(int(seconds * 16_000), np.int16), 16_000)
        lines.append(f"{number}.wav,{text}")
    (tmp_path / "texts.csv").write_text("\n".join(lines) + "\n")
    document = {
        "name": "t",
        "source": {"kind": "table", "manifest": str(tmp_path / "texts.csv"), "columns": {"audio": "path"}},
        "text": {"tokenizer": str(ROOT / "demo" / "speech" / "model"), "prompt": "plain"},
        "run": {"cache_root": str(tmp_path / "caches"), "num_workers": 1},
    }
    report = report_texts(load_config(document), progress=False)
    found = report.to_json()
    assert found["pace"]["durations"] == "by their headers"
    assert [each["row"] for each in found["pace"]["outliers"]] == [40]
    assert any("1 text may not be of their recording" in line for line in report.lines())
    assert found["repeated"]["top"][0]["count"] == 40


def test_what_a_build_leaves_out_is_counted_by_its_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {"id": "good", "text": "Hello there", "language": "en"},
        {"id": "again", "text": "Hello  there", "language": "en"},
        {"id": "nul", "text": "a\0b"},
        {"id": "surrogate", "text": "a\ud800b"},
        {"id": "empty", "text": " \u200c "},
        {"id": "long", "text": "word " * 200, "language": "en"},
        {"id": "mixed", "text": "\u202eпривет нело \u200f"},
    ]
    arguments = texts(tmp_path, [], "text.max_label_tokens=100", 'text.normalize=["nfkc","lower"]')
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run_json(capsys, "text", *arguments)
    reasons = {each["reason"]: each["count"] for each in found["failures"]}
    assert reasons == {"bad_text": 2, "empty_text": 1, "label_too_long": 1}
    assert found["labels"]["longest"][0]["sample_id"] == "long"
    assert [(each["count"], each["sample_id"]) for each in found["repeated"]["top"]] == [(2, "good")]
    assert found["pace"]["durations"] is None
    code, out, _ = run(capsys, "text", *arguments)
    assert code == 0
    assert "left out: 4 samples" in out
    assert ", 1 text above)" in out
    assert "the texts have no recordings of known length" in out
    for name, reason in (("empty", "empty_text"), ("long", "label_too_long")):
        code, out, _ = run(capsys, "text", *arguments, "--sample", name)
        assert code == 1
        assert f"left out      {reason}: " in out
        assert f"forebay explain {reason}" in out
    code, out, _ = run(capsys, "text", *arguments, "--sample", "nul")
    assert (code, "left out      bad_text: " in out) == (1, True)
    code, _, err = run(capsys, "text", *arguments, "--sample", 3)  # a line that cannot be read is known by its number
    assert (code, "line 4" in err, "forebay explain bad_text" in err) == (1, True, True)
    document = run(capsys, "text", *arguments, "--sample", "long", "--json")[1]
    assert json.loads(document)["num_label_tokens"] > 100


def test_a_row_that_the_listing_leaves_out_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_bytes(b"good\n\xff\xfe\nbetter\n")
    arguments = texts(tmp_path, [], f'source.manifest="{tmp_path / "texts.txt"}"')
    code, _, err = run(capsys, "text", *arguments, "--sample", "1")
    assert code == 1
    assert "bad_text: forebay explain bad_text" in err
    assert "line 2" in err
    (failure,) = run_json(capsys, "text", *arguments)["failures"]
    assert (failure["reason"], failure["count"]) == ("bad_text", 1)


def test_a_source_of_nothing_but_bad_lines_has_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_bytes(b"bad \xff\n")
    arguments = texts(tmp_path, [], f'source.manifest="{tmp_path / "texts.txt"}"')
    code, out, _ = run(capsys, "text", *arguments)
    assert code == 0
    assert "0 texts, read from the raw data" in " ".join(out.split())
    assert "left out: 1 sample;" in out
    assert run_json(capsys, "text", *arguments)["languages"] == []
    code, _, err = run(capsys, "text", *arguments, "--sample", "9")
    assert code == 2
    assert "lists 0 samples, and none with that id" in err


def test_a_text_of_the_command_line_is_shown_step_by_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = texts(tmp_path, [], 'text.normalize=["nfkc","lower"]')
    found = run_json(capsys, "text", *arguments, "--text", "ﬁne  Day", "--language", "en", "--diff")
    assert [(each["step"], each["text"], each["removed"], each["added"]) for each in found["steps"]] == [
        ("nfkc", "fine Day", 2, 2),
        ("lower", "fine day", 1, 1),
    ]
    for each, before in zip(found["steps"], ("ﬁne  Day", "fine Day"), strict=True):
        assert "".join(part["text"] for part in each["changes"] if part["change"] != "added") == before
        assert "".join(part["text"] for part in each["changes"] if part["change"] != "removed") == each["text"]
    assert found["language"] == {"given": "en", "used": "en", "detected": None, "confidence": None}
    assert (found["source"], found["row"], found["failure"]) == (None, None, None)
    code, out, _ = run(capsys, "text", *arguments, "--text", "ﬁne  Day", "--diff")
    assert code == 0
    assert "nfkc          [-ﬁ-]{+fi+}ne[- -] Day" in out
    assert "lower         fine [-D-]{+d+}ay" in out
    assert "unchanged" in run(capsys, "text", *arguments, "--text", "plain")[1]


def test_changes_have_colours_on_a_terminal_and_what_strangers_write_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = text_config(tmp_path, 'text.normalize=["lower"]')
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", VisibleStream(stream))
    print_view(view_text(config, "A\x1b[2J", is_diff=True))
    line = next(line for line in stream.getvalue().splitlines() if line.startswith("lower"))
    assert (
        line == "lower         \x1b[30;41mA\x1b[0m\x1b[30;42ma\x1b[0m<ESCAPE>[2\x1b[30;41mJ\x1b[0m\x1b[30;42mj\x1b[0m"
    )
    monkeypatch.setenv("NO_COLOR", "1")
    stream.truncate(stream.seek(0))
    print_view(view_text(config, "A", is_diff=True))
    assert "[-A-]{+a+}" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@given(text=wicked_texts() | st.text(st.characters(exclude_categories=()), max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_shown_or_says_why_not(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = _config(tmp_path_factory)
    view = view_text(config, text, is_diff=True)
    lines = ["".join(part.text for part in line) for line in view.lines()]
    assert all(line.isprintable() for line in lines)
    assert (view.look.failure is None) == (view.look.ids != ())
    json.dumps(view.to_json())


_CONFIGS: list[Any] = []


def _config(factory: pytest.TempPathFactory) -> Any:
    if not _CONFIGS:
        _CONFIGS.append(text_config(factory.mktemp("texts"), 'text.normalize=["nfkc","lower"]'))
    return _CONFIGS[0]


def test_a_language_that_the_text_names_is_no_part_of_the_transcript(capsys: pytest.CaptureFixture[str]) -> None:
    config, text = ROOT / "configs" / "demo_qwen3_asr.toml", "language French<asr_text>Ça va"
    code, out, _ = run(capsys, "text", config, "--text", text)
    assert code == 0
    assert "language      French, named by the text\n" in out
    assert "transcript    Ça va\n" in out
    found = run_json(capsys, "text", config, "--text", text)
    assert (found["text"], found["language"]["used"]) == (text, "French")
    assert [each["role"] for each in found["tokens"]].count("prefix") == found["prefix_len"]
    assert found["num_label_tokens"] == found["num_tokens"] - found["prefix_len"]


def test_labels_that_the_source_holds_are_shown_as_what_they_say(tmp_path: Path) -> None:
    held = recordings()
    save(tmp_path / "set", held.features, held.labels)
    config = given_config(tmp_path)
    found = report_texts(config, progress=False).to_json()
    assert found["failures"] == []
    assert found["steps"] == []
    assert sum(each["characters"] for each in found["languages"]) > found["num_texts"]
    view = view_sample(config, "0", progress=False)
    assert view.look.text == held.texts[0]
    assert view.look.text == view.look.body != view.look.asked.text


def test_steps_are_called_as_the_config_calls_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions of a user are two steps."""
    looker = view_text(text_config(tmp_path, 'text.normalize=["nfkc","lower"]'), "A")
    assert [name for name, _ in looker.look.staged.steps] == ["nfkc", "lower"]
    monkeypatch.setattr("forebay.inspect.text_report.entries", lambda _: ("a.py:f", "b.py:f"))
    renamed = view_text(text_config(tmp_path, 'text.normalize=["nfkc","lower"]'), "A")
    assert [each["step"] for each in renamed.to_json()["steps"]] == ["a.py:f", "b.py:f"]
    assert list(report_texts(text_config(tmp_path), progress=False).tally.steps) == ["a.py:f", "b.py:f"]


def test_a_detected_language_is_shown_with_its_confidence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("py3langid")
    config, text = ROOT / "configs" / "demo_text.toml", "Ich bin heute leider viel zu müde dafür."
    found = run_json(capsys, "text", config, "--text", text, "--language", "en")
    assert (found["language"]["given"], found["language"]["used"]) == ("en", "de")
    assert found["language"]["detected"] == "de"
    assert found["language"]["confidence"] > 0.5
    out = run(capsys, "text", config, "--text", text, "--language", "en")[1]
    assert out.startswith("language      de, detected with confidence ")
    assert "; en was given" in out.splitlines()[0]
    assert "nothing was detected" in run(capsys, "text", config, "--text", "12")[1]
    rows = run_json(capsys, "text", config, "--max-samples", 60, "--cache-root", tmp_path)
    assert rows["detects"]
    assert sum(each["texts"] for each in rows["languages"]) == 60


def test_of_a_text_without_end_the_first_part_is_shown(tmp_path: Path) -> None:
    view = view_text(text_config(tmp_path, 'text.normalize=["lower"]'), "No end. " * 5000, is_diff=True)
    lines = ["".join(part.text for part in line) for line in view.lines()]
    assert len(lines) < 3000
    assert sum("more characters: --json" in line for line in lines) == 2
    assert lines[-1] == f"  ... and {len(view.look.ids) - 2000:,} more tokens: --json"
    assert len(view.to_json()["tokens"]) == len(view.look.ids)


def test_lines_fit_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    config = text_config(tmp_path, 'text.normalize=["nfkc","lower"]')
    view = view_text(config, "Some Words of a Sentence, " * 4, is_diff=True)
    lines = ["".join(part.text for part in line) for line in view.lines()]
    assert max(map(len, lines)) <= 40
    wide = [line for line in report_texts(config, progress=False).lines() if len(line) > 40]
    assert [line for line in wide if " " in line] == []  # a path is not broken


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a", "--sample", "1"], "--text and --sample 1 are two texts"),
        (["--language", "en"], "--language en is of --text"),
        (["--diff"], "--diff shows one text"),
        (["--sample", "999"], "lists 52 samples, rows 0 to 51, and none"),
        (["--sample", "\udce9"], "none with that id"),
    ],
)
def test_wrong_use_says_what_to_name(
    capsys: pytest.CaptureFixture[str], demo: list[object], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, "text", *demo, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_configs_without_transcripts_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "text", ROOT / "configs" / "demo_vision.toml", "--text", "a")
    assert code == 2
    assert 'text.prompt = "chat", and forebay text shows transcripts' in err
    path = tmp_path / "audio.toml"
    path.write_text('name = "a"\n[source]\nkind = "tar"\nmanifest = "train.parquet"\n')
    code, _, err = run(capsys, "text", path, "--text", "a")
    assert code == 2
    assert "has no [text] section" in err
