from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.cli.options import ConfigCommand, command_of
from forebay.cli.program import make_parser
from forebay.config import BucketConfig, Config, parse_config
from forebay.config.load import RENAMED
from forebay.errors import ConfigError
from forebay.steps.recipe import section_problems

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BASE = 'name = "x"\n[source]\nkind = "tar"\nmanifest = "m.parquet"\n'


def load(tmp_path: Path, text: str = "", *overrides: str) -> Config:
    """Loads the smallest config with `text` after it; where `text` has keys first, they belong to `[source]`."""
    (tmp_path / "config.toml").write_text(BASE + text, encoding="utf-8")
    return load_config(tmp_path / "config.toml", overrides=overrides)


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "config.toml"))) as caught:
        load(tmp_path, text, *overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_of_the_repository_loads_and_its_paths_are_there(path: Path) -> None:
    config = load_config(path)
    assert config.path == str(path)
    assert config.plan is not None
    for manifest in config.source.manifests:
        # `make demo-remote` puts the demo's own files at the URL.
        place = Path(manifest.replace("s3://demo/raw", str(CONFIGS.parent / "demo" / "speech")))
        assert list(place.parent.glob(place.name)), manifest
    if config.text is not None:
        assert Path(config.text.tokenizer).is_dir()
    assert config.remote_root is not None or config.cache_root == CONFIGS.parent / "caches"
    assert config.train.output_dir == str(CONFIGS.parent / "runs")


def test_the_smallest_config_has_the_documented_defaults(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.audio is not None
    assert (config.audio.features, config.audio.sample_rate_hz, config.text, config.plan) == (
        "log_mel",
        16_000,
        None,
        None,
    )
    assert (config.layout.rows_per_shard, config.loader.cache, config.run.max_open_tars) == (512, "auto", 64)


def test_unknown_fields_are_refused_with_the_nearest_name(tmp_path: Path) -> None:
    text = "max_duration = 3.0\n[audio]\nn_mel = 80\n[trainn]\n[plan]\nbatch_size = 2\nzzzzzz = 1\n"
    assert problems(tmp_path, text) == [
        "source.max_duration: unknown field; did you mean source.max_duration_s?",
        "plan.zzzzzz: unknown field",
        "trainn: unknown field; did you mean train?",
        "audio.n_mel: unknown field; did you mean audio.n_mels?",
    ]


@pytest.mark.parametrize("name", ["str", "int", "TextConfig", "PlanConfig", "a[b"])
def test_unknown_fields_named_like_types_keep_their_names(tmp_path: Path, name: str) -> None:
    assert problems(tmp_path, f'"{name}" = 1\n')[0].startswith(f"source.{name}: unknown field")
    (tmp_path / "config.toml").write_text(f'"{name}" = 1\n{BASE}')
    with pytest.raises(ConfigError, match=rf"  {re.escape(name)}: unknown field"):
        load_config(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_samples = true\n", "source.max_samples: Input should be a valid integer, got True"),
        ("max_samples = 3.0\n", "source.max_samples: Input should be a valid integer, got 3.0"),
        ('max_samples = "3"\n', "source.max_samples: Input should be a valid integer, got '3'"),
        ("min_duration_s = true\n", "source.min_duration_s: Input should be a valid number, got True"),
        ('min_duration_s = "1"\n', "source.min_duration_s: Input should be a valid number, got '1'"),
        ('languages = "en"\n', "source.languages: Input should be a valid array, got 'en'"),
        ('languages = ["en", 3]\n', "source.languages.1: Input should be a valid string, got 3"),
        ("split = 1\n", "source.split: Input should be a valid string, got 1"),
        ('overlong = "cut"\n', "source.overlong: Input should be 'keep', 'clip' or 'drop', got 'cut'"),
        ("[audio]\nkeep_waveform = 1\n", "audio.keep_waveform: Input should be a valid boolean, got 1"),
        ("[text]\n", "text.tokenizer: missing"),
        ("[plan]\nbatch_size = 1\nedges_s = 3\n", "plan.edges_s: Input should be a valid array, got 3"),
        ("[loader]\nseed = 1.5\n", "loader.seed: Input should be a valid integer, got 1.5"),
        ("[run]\nnum_workers = true\n", "run.num_workers: Input should be a valid integer, got True"),
    ],
)
def test_wrong_types_are_named_by_their_dotted_field(tmp_path: Path, text: str, problem: str) -> None:
    assert problems(tmp_path, text) == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('manifest = ""', "source: manifest is '', wanted a file, a folder or a glob"),
        ("manifest = []", "source: manifest is (), wanted a file, a folder or a glob"),
        ('manifest = ["a", ""]', "source: manifest is ('a', ''), wanted a file, a folder or a glob"),
        ("min_duration_s = -1", "source: min_duration_s is -1.0, wanted 0 or more"),
        ("min_duration_s = 3\nmax_duration_s = 3", "source: max_duration_s (3.0) is not above min_duration_s (3.0)"),
        ('overlong = "drop"', 'source: overlong = "drop" needs max_duration_s'),
        ("max_samples = 0", "source: max_samples is 0, wanted 1 or more"),
        ("max_sample_bytes = 0", "source: max_sample_bytes is 0, wanted 1 or more"),
        (
            "[audio]\nsample_rate_hz = 8000",
            'audio: features = "log_mel" is defined at 16000 Hz; sample_rate_hz is 8000',
        ),
        (
            '[audio]\nfeatures = "qwen3_asr"\nn_mels = 80',
            'audio.n_mels: unknown field of features = "qwen3_asr"; it is only for features = "log_mel"',
        ),
        (
            '[audio]\ndtype = "int16"',
            'audio.dtype: features = "log_mel" wants "float16" or "float32", got \'int16\'',
        ),
        (
            '[audio]\nfeatures = "waveform"\ndtype = "float16"',
            'audio.dtype: features = "waveform" wants "int16" or "float32", got \'float16\'',
        ),
        (
            '[audio]\nfeatures = "waveform"\nkeep_waveform = true',
            "audio: keep_waveform is only for features other than",
        ),
        ('[audio]\nfeatures = "waveform"\nsample_rate_hz = 1', "audio: sample_rate_hz is 1, wanted 1000 to 384000"),
        ('[text]\ntokenizer = "t"\nmax_label_tokens = 0', "text: max_label_tokens is 0, wanted 1 or more"),
        ("[layout]\nrows_per_shard = 0", "layout: rows_per_shard is 0, wanted 1 to 1000000"),
        ("[plan]", "plan: give exactly one of batch_seconds and batch_size"),
        ("[plan]\nbatch_size = 1\nbatch_seconds = 1", "plan: give exactly one of batch_seconds and batch_size"),
        ("[plan]\nbatch_size = [1, 2]", "plan: batch_size has 2 entries for 7 buckets"),
        ("[plan]\nbatch_size = 0", "plan: batch_size is 0, wanted 1 or more"),
        ("[plan]\nbatch_seconds = 0", "plan: batch_seconds is 0.0, wanted more than 0"),
        ("[plan]\nbatch_size = 1\nedges_s = [3, 3]", "plan: edges_s must rise from above 0, got [3.0, 3.0]"),
        ("[plan]\nbatch_size = 1\nedges_s = []", "plan: edges_s must rise from above 0, got []"),
        ("[plan]\nbatch_size = 1\nlockstep = 0", "plan: lockstep is 0, wanted 1 or more"),
        ("[train]\nmax_steps = 0", "train: max_steps is 0, wanted 1 or more"),
        ("[loader]\nnum_threads = -1", "loader: num_threads is -1, wanted 0 or more"),
        ("[run]\nnum_workers = 0", "run: num_workers is 0, wanted 1 or more"),
        ("[run]\nmax_failed_share = 2.0", "run: max_failed_share is 2.0, wanted 0 to 1"),
        ("[run]\nmax_open_tars = 0", "run: max_open_tars is 0, wanted 1 or more"),
    ],
)
def test_impossible_values_are_named(tmp_path: Path, text: str, problem: str) -> None:
    if text.startswith("manifest"):
        (tmp_path / "config.toml").write_text(f'name = "x"\n[source]\nkind = "tar"\n{text}\n')
        with pytest.raises(ConfigError, match=re.escape(problem)):
            load_config(tmp_path / "config.toml")
    else:
        (found,) = problems(tmp_path, text)
        assert found.startswith(problem)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    text = 'max_samples = "many"\nsplti = "x"\n[audio]\nfeatures = "mfcc"\n'
    text += "[layout]\nrows_per_shard = 0\n[run]\ncache_root = 3\n"
    found = problems(tmp_path, text)
    assert [line.split(":")[0] for line in found] == [
        *("source.max_samples", "source.splti"),
        *("layout", "run.cache_root", "audio.features"),
    ]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "2020-01-01", "07:32:00"])
def test_what_toml_has_and_no_setting_is_is_refused_by_name(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml: source\.max_duration_s is .*, which no setting can be"):
        load(tmp_path, f"max_duration_s = {value}\n")
    with pytest.raises(ConfigError, match=r"config\.toml: plan\.edges_s is .*, which no setting can be"):
        load(tmp_path, f"[plan]\nbatch_size = 1\nedges_s = [1.0, {value}]\n")


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "..", "a\\nb"])
def test_names_that_are_no_folder_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.toml").write_text(BASE.replace('"x"', f'"{name}"'))
    with pytest.raises(ConfigError, match=r"name .* becomes a folder: use letters, digits"):
        load_config(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"source\.split 'a/b' becomes a folder"):
        load(tmp_path, 'split = "a/b"\n')


def test_integers_are_taken_for_numbers_and_become_them(tmp_path: Path) -> None:
    config = load(tmp_path, "max_duration_s = 30\n[plan]\nbatch_seconds = 3\nedges_s = [1, 2]\n")
    assert isinstance(config.plan, BucketConfig)
    values = [config.source.max_duration_s, config.plan.batch_seconds, *config.plan.edges_s]
    assert [(type(value), value) for value in values] == [(float, 30.0), (float, 3.0), (float, 1.0), (float, 2.0)]


def test_relative_paths_are_relative_to_the_file_and_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[text]\ntokenizer = "../t/./u"\n[train]\nmodel = "/abs/model"\n'
    monkeypatch.chdir("/")
    config = load(tmp_path, text, "source.manifest=['a/*.tsv', '../b', '/c']")
    assert config.source.manifests == (f"{tmp_path}/a/*.tsv", f"{tmp_path.parent}/b", "/c")
    assert config.text is not None
    assert config.text.tokenizer == f"{tmp_path.parent}/t/u"
    assert (config.train.model, config.loader.cache_dir) == ("/abs/model", None)
    assert (config.run.cache_root, config.train.output_dir) == (f"{tmp_path}/caches", f"{tmp_path}/runs")
    monkeypatch.chdir(tmp_path)
    assert load_config("config.toml", overrides=["run.cache_root=here"]).run.cache_root == f"{tmp_path}/here"
    assert load(tmp_path).source.manifests == (f"{tmp_path}/m.parquet",)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("loader.seed=3", "loader.seed", 3),
        ("loader.seed = 3 # why not", "loader.seed", 3),
        ("source.split=dev", "source.split", "dev"),
        ('source.split="dev"', "source.split", "dev"),
        ('source.languages=["en", "no"]', "source.languages", ("en", "no")),
        ("source.languages=[]", "source.languages", ()),
        ("loader.pin_memory=true", "loader.pin_memory", True),
        ("source.max_duration_s=30", "source.max_duration_s", 30.0),
        ("train.learning_rate=1e-3", "train.learning_rate", 0.001),
        ("name=other", "name", "other"),
        ("source.columns.text=a=b", "source.columns.text", "a=b"),
        ("source.columns.text=", "source.columns.text", ""),
        ("source.columns.text=x\nseed = 4", "source.columns.text", "x\nseed = 4"),
        ("source.columns.text=3\nother = 4", "source.columns.text", "3\nother = 4"),
    ],
)
def test_overrides_are_toml_or_text(tmp_path: Path, override: str, path: str, value: Any) -> None:
    found: Any = load(tmp_path, "", 'source.kind="hf"', override)
    for part in path.split("."):
        found = getattr(found, part)
    assert (type(found), found) == (type(value), value)


def test_overrides_make_sections_win_over_the_file_and_over_earlier_ones(tmp_path: Path) -> None:
    config = load(
        tmp_path, "[loader]\nseed = 1\n", "loader.seed=2", "loader.seed=3", "plan.batch_size=4", "text.tokenizer=t"
    )
    assert config.loader.seed == 3
    assert isinstance(config.plan, BucketConfig)
    assert config.plan.batch_size == 4
    assert config.text is not None
    train = load(
        tmp_path, "[train]\nepochs = 3\nwarmup_ratio = 0.1\n", "train.max_steps=2", "train.warmup_steps=1"
    ).train
    assert (train.max_steps, train.epochs, train.warmup_steps, train.warmup_ratio) == (2, None, 1, None)


@pytest.mark.parametrize("override", ["loader.seed", "=3", ".seed=3", "train.=3", "train..seed=3", ""])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"override {override!r} is not section.field=value")):
        load(tmp_path, "", override)


def test_the_words_of_a_command_mean_the_config_with_its_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home := tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path)
    config = load(home, "", 'source.languages=["en"]', "run.cache_root=its root")
    words = shlex.split(config.named)
    assert words == ["a b/config.toml", "--set", 'source.languages=["en"]', "--cache-root", "a b/its root"]
    asked = command_of(make_parser().parse_args(["key", *words]))
    assert isinstance(asked, ConfigCommand)
    assert asked.loaded() == dataclasses.replace(config, given=asked.loaded().given)


def test_an_override_below_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"override 'name\.x=1': name is not a section"):
        load(tmp_path, "", "name.x=1")


def test_an_override_is_checked_like_the_file(tmp_path: Path) -> None:
    assert problems(tmp_path, "", "loader.sed=3", "train.grad_acc=true") == [
        "loader.sed: unknown field; did you mean loader.seed?",
        "train.grad_acc: Input should be a valid integer, got True",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name = ", r"config\.toml is not TOML"),
        (b"name = 'a'\nname = 'b'\n", r"config\.toml is not TOML"),
        (b"name = '\xff'", r"config\.toml is not TOML"),
        (b"a = " + b"[" * 10_000, r"config\.toml is not TOML"),
        (b"", r"name: missing\n  source: missing"),
        (b"source = 3\nname = 'x'\n", r"source: Input should be an object, got 3"),
        (b"path = 'x'\n", r"config\.toml: unknown field path"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "config.toml")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read config .*none\.toml: No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"is no config, which is a TOML file; if it is data, .*: forebay init "):
        load_config(tmp_path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
NAMES = [
    *(("source", name) for name in ("manifest", "languages", "max_samples", "junk", "str")),
    *(("plan", name) for name in ("kind", "edges_s", "batch_size", "seq_len")),
    *(("source", "columns"), ("mixture", "source"), ("mixture", "weights"), ("train", "mixture")),
    *(("audio", name) for name in ("dtype", "features", "settings", "n_mels")),
    *(("text", "tokenizer"), ("text", "prompt"), ("text", "junk"), ("vision", "alpha")),
    *(("loader", "cache_dir"), ("run", "num_workers")),
]


@given(st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=3))
def test_any_document_is_a_config_or_a_config_error(values: dict[tuple[str, str], Any]) -> None:
    document: dict[str, Any] = {"name": "x", "source": {"kind": "tar", "manifest": "m"}}
    for (section, field), value in values.items():
        document.setdefault(section, {})[field] = value
    try:
        config = parse_config(document, path=Path("/folder/config.toml"), check=section_problems)
    except ConfigError as err:
        message = str(err)
        assert message.startswith("/folder/config.toml")
        return
    assert config.name == "x"


def test_the_whole_tree_is_frozen(tmp_path: Path) -> None:
    config = load(tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError, match="seed"):
        config.loader.seed = 3  # type: ignore[misc]
    assert hash(config) == hash(load(tmp_path))
    assert config == load(tmp_path)


@pytest.mark.parametrize("old", RENAMED)
def test_yesterdays_name_is_refused_with_todays(tmp_path: Path, old: str) -> None:
    assert problems(tmp_path, "", f"{old}=1") == [f"{old}: now {RENAMED[old]}"]
    assert _has_field(RENAMED[old])


def test_a_list_of_tables_by_yesterdays_name_is_refused_too(tmp_path: Path) -> None:
    text = '[[train.mixture]]\ncache = "a"\n[[train.mixture]]\ncache = "b"\n'
    assert problems(tmp_path, text) == ["train.mixture: now mixture.source"]


def _has_field(name: str) -> bool:
    owner: Any = Config
    for part in name.split("."):
        hints = [get_type_hints(one) for one in get_args(owner) or (owner,) if one is not type(None)]
        found = [each[part] for each in hints if part in each]
        if not found:
            return False
        owner = found[0]
    return True
