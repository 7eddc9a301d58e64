"""`forebay warm-start` on tiny models of all families, and a training run from the folder that it makes."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, AutoTokenizer

from forebay import cli
from forebay.errors import ConfigError, ForebayError
from forebay.steps.recipe import load_config
from forebay.train.loop.run import run
from forebay.train.models.model_folder import load_model, model_facts
from forebay.train.vocabulary_ids import nodes
from forebay.train.warm_start import NewTokenizer, WarmStartReport, moves_of, warm_start
from tests.preprocess.here_pool import build_here
from tests.text_corpus import ROOT
from tests.train.warm_start.folders import DEMO, FAMILIES, Family, document_of, model_folder, new_tokenizer

KINDS = list(itertools.product(FAMILIES, [True, False]))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer for each family, and its models, tied and not, on that tokenizer."""
    made = tmp_path_factory.mktemp("warm_start")
    for family in FAMILIES:
        new_tokenizer(made / family / "tokenizer", family)
    for family, tied in KINDS:
        model_folder(made / family / f"old_{tied}", family, tied=tied)
        assert start(made, family, tied).out == str(made / family / f"new_{tied}")
    return made


def start(root: Path, family: Family, tied: bool, *, out: str = "new", seed: int = 0) -> WarmStartReport:  # noqa: FBT001
    folder = root / family
    return warm_start(folder / f"old_{tied}", tokenizer=folder / "tokenizer", out=folder / f"{out}_{tied}", seed=seed)


def both(root: Path, family: Family, tied: bool) -> tuple[Any, Any, dict[str, int], dict[str, int]]:  # noqa: FBT001
    """Returns the old and the new model, and the ids of their tokenizers."""
    folders = [root / family / f"{name}_{tied}" for name in ("old", "new")]
    models = [load_model(folder, seed=0).eval() for folder in folders]
    vocabularies = [AutoTokenizer.from_pretrained(folder).get_vocab() for folder in folders]
    return models[0], models[1], vocabularies[0], vocabularies[1]


@pytest.mark.parametrize(("family", "tied"), KINDS)
@pytest.mark.few
def test_rows_of_shared_tokens_are_copied_and_the_others_are_new(root: Path, family: Family, tied: bool) -> None:  # noqa: FBT001
    old, new, old_ids, new_ids = both(root, family, tied)
    shared = sorted(old_ids.keys() & new_ids.keys())
    fresh = sorted(new_ids.keys() - old_ids.keys())
    assert len(shared) > 300
    assert len(fresh) > 30
    for name in ("get_input_embeddings", "get_output_embeddings"):
        was, now = getattr(old, name)().weight, getattr(new, name)().weight
        assert now.shape == (len(new_ids), was.shape[1])
        assert torch.equal(now[[new_ids[token] for token in shared]], was[[old_ids[token] for token in shared]])
        drawn = now[[new_ids[token] for token in fresh]]
        assert len(torch.unique(drawn, dim=0)) == len(fresh)
        # As wide as the old rows: not the mean, which `mean_resizing` gives. 50 rows or more of 64 values.
        assert drawn.std().item() == pytest.approx(was.std().item(), rel=0.1)
    inputs, outputs = new.get_input_embeddings().weight, new.get_output_embeddings().weight
    assert (inputs is outputs) == tied
    assert tied or not torch.equal(inputs[new_ids[fresh[0]]], outputs[new_ids[fresh[0]]])
    kept = {name: value for name, value in old.state_dict().items() if value.shape[0] != len(old_ids)}
    assert all(torch.equal(new.state_dict()[name], value) for name, value in kept.items())


@pytest.mark.parametrize(("family", "tied"), KINDS)
@pytest.mark.few
def test_a_text_of_shared_tokens_has_the_old_logits(root: Path, family: Family, tied: bool) -> None:  # noqa: FBT001
    """The strongest oracle: what the old model says of shared tokens after shared tokens, the new one says too."""
    old, new, old_ids, new_ids = both(root, family, tied)
    special = {name for name in old_ids if name.startswith("<|")}
    shared = sorted((old_ids.keys() & new_ids.keys()) - special)
    text = [shared[i] for i in np.random.default_rng(0).integers(len(shared), size=40)]
    logits = []
    for model, ids in ((old, old_ids), (new, new_ids)):
        tokens = torch.tensor([[ids[token] for token in text]])
        inputs = {"decoder_input_ids": tokens, "encoder_outputs": (torch.ones(1, 5, 64),)}
        with torch.no_grad():
            output = model(**(inputs if family == "whisper" else {"input_ids": tokens})).logits
        logits.append(output[0][:, [ids[token] for token in shared]])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few("whisper")
def test_every_id_names_the_token_that_it_named(root: Path, family: Family) -> None:
    old, new, old_ids, new_ids = both(root, family, tied=True)
    old_tokens, new_tokens = ({i: token for token, i in ids.items()} for ids in (old_ids, new_ids))
    num_compared = 0
    places = [*zip(nodes(old.config), nodes(new.config), strict=True), (old.generation_config, new.generation_config)]
    for was, now in places:
        for name, value in vars(was).items():
            if name.endswith("_token_id") and value is not None:
                ids = [value, getattr(now, name)]
                before, after = ([each] if isinstance(each, int) else each for each in ids)
                assert [old_tokens[i] for i in before] == [new_tokens[i] for i in after], name
                num_compared += 1
    assert num_compared >= 4
    assert model_facts(root / family / "new_True").vocab_size == len(new_ids)
    if family == "whisper":
        generation = new.generation_config
        assert generation.lang_to_id == {tag: new_ids[tag] for tag in old.generation_config.lang_to_id}
        assert generation.task_to_id == {task: new_ids[f"<|{task}|>"] for task in ("translate", "transcribe")}
        assert new.config.max_target_positions == old.config.max_target_positions == 448
        # Token 220 of the demo's tokenizer; 50256, the other default of transformers, is none of its tokens.
        assert [new_tokens[i] for i in new.config.begin_suppress_tokens] == [old_tokens[220]]


def test_the_report_counts_tokens(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, model = root / "whisper" / "tokenizer", root / "whisper" / "old_True"
    arguments = ["warm-start", str(model), "--tokenizer", str(tokenizer), "--out"]
    assert cli.main([*arguments, str(tmp_path / "json"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    old_ids, new_ids = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (model, tokenizer))
    shared = old_ids.keys() & new_ids.keys()
    wanted = {"copied": len(shared), "drawn": len(new_ids) - len(shared), "dropped": len(old_ids) - len(shared)}
    wanted |= {"old_size": len(old_ids), "new_size": len(new_ids), "ids_dropped": 1}
    assert report == {**wanted, "out": str(tmp_path / "json")}
    assert cli.main([*arguments, str(tmp_path / "lines"), "--seed", "3"]) == 0
    assert f"{len(old_ids)} -> {len(new_ids)} tokens: {len(shared)} copied" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_folder_is_whole(root: Path, family: Family) -> None:
    new, folder = root / family / "tokenizer", root / family / "new_True"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "The new words, read aloud."
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(new)(text)["input_ids"]
    assert (folder / "tokenizer.json").read_bytes() == (new / "tokenizer.json").read_bytes()
    for name in ("preprocessor_config.json", *(["chat_template.jinja"] if family != "whisper" else [])):
        assert (folder / name).read_bytes() == (DEMO[family] / name).read_bytes()
    if family != "qwen3_vl":  # its processor needs torchvision, for videos
        processor = AutoProcessor.from_pretrained(folder)
        assert processor.tokenizer.get_vocab() == tokenizer.get_vocab()
        audio = processor.feature_extractor(np.zeros(16_000, np.float32), sampling_rate=16_000)
        assert audio["input_features"][0].shape[0] in (80, 128)


@pytest.mark.parametrize(("family", "tied"), [("whisper", True), ("qwen3_asr", False), ("qwen3_vl", True)])
@pytest.mark.few("whisper-True", "qwen3_asr-False")
def test_its_own_tokenizer_changes_nothing(root: Path, tmp_path: Path, family: Family, tied: bool) -> None:  # noqa: FBT001
    model = root / family / f"old_{tied}"
    report = warm_start(model, tokenizer=model, out=tmp_path / "out")
    assert (report.copied, report.drawn, report.dropped) == (report.old_size, 0, 0)
    old, new = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out"))
    assert old.keys() == new.keys()
    assert all(torch.equal(value, new[name]) for name, value in old.items())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        was, now = (_without_noise(document_of(folder, name)) for folder in (model, tmp_path / "out"))
        assert was == now


def _without_noise(document: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration without what transformers adds as it saves, and its default id that no token has."""
    noise = ("dtype", "begin_suppress_tokens")
    return {k: _without_noise(v) if isinstance(v, dict) else v for k, v in document.items() if k not in noise}


def test_a_whisper_writes_with_its_new_ids(root: Path) -> None:
    model = load_model(root / "whisper" / "new_True", seed=0).eval()
    tokenizer = AutoTokenizer.from_pretrained(root / "whisper" / "new_True")
    features = torch.zeros(1, 80, 3000)
    ids = model.generate(features, language="hi", task="translate", max_new_tokens=4, return_dict_in_generate=True)
    start = [tokenizer.convert_ids_to_tokens(i) for i in ids["sequences"][0].tolist()[:4]]
    assert start == ["<|startoftranscript|>", "<|hi|>", "<|translate|>", "<|notimestamps|>"]


def test_a_bare_tokenizer_gets_the_names_of_its_control_tokens(root: Path, tmp_path: Path) -> None:
    """`tokenizers` saves one file; the model's tokenizer_config.json says which token is which."""
    bare = new_tokenizer(tmp_path / "bare", "qwen3_asr", bare=True)
    warm_start(root / "qwen3_asr" / "old_True", tokenizer=bare, out=tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert (processor.audio_token, processor.tokenizer.eos_token) == ("<|audio_pad|>", "<|im_end|>")
    assert processor.tokenizer.pad_token == "<|endoftext|>"
    whole = load_file(root / "qwen3_asr" / "new_True" / "model.safetensors")
    assert all(torch.equal(value, whole[name]) for name, value in load_file(tmp_path / "out/model.safetensors").items())


def test_the_seed_alone_decides(root: Path) -> None:
    start(root, "qwen3_asr", tied=False, out="again")
    torch.manual_seed(5)
    start(root, "qwen3_asr", tied=False, out="other", seed=1)
    new, again, other = (
        load_file(root / "qwen3_asr" / f"{name}_False" / "model.safetensors") for name in ("new", "again", "other")
    )
    assert all(torch.equal(value, again[name]) for name, value in new.items())
    assert [name for name, value in new.items() if not torch.equal(value, other[name])] == [
        name for name in new if "embed_tokens" in name or "lm_head" in name
    ]


def test_letters_are_not_taken_for_bytes() -> None:
    """A vocabulary of bytes has 0xE9 for `é`; where alphabets differ, ASCII and control tokens are shared."""
    old_ids = {"a": 0, "é": 1, "<｜go｜>": 2, "b": 3}
    ids = {"é": 0, "b": 1, "<｜go｜>": 2, "ü": 3}
    new = NewTokenizer(folder=Path("new"), ids=ids, added=frozenset({"<｜go｜>"}), byte_level=False)
    assert moves_of(old_ids, new, same_alphabet=True).copied == {0: 1, 1: 3, 2: 2}
    moves = moves_of(old_ids, new, same_alphabet=False)
    assert (moves.copied, moves.drawn, moves.size) == ({1: 3, 2: 2}, {0: "é", 3: "ü"}, 4)


def test_rows_without_a_token_are_left_out(root: Path, tmp_path: Path) -> None:
    """An embedding is often larger than its tokenizer: its last rows would move the mean and mean nothing."""
    tokenizer = root / "qwen3_asr" / "tokenizer"
    model = model_folder(tmp_path / "padded", "qwen3_asr", rows=800)
    weights = load_file(model / "model.safetensors")
    [name] = [name for name in weights if "embed_tokens" in name]
    reports = []
    for value, out in ((0.0, "a"), (100.0, "b")):
        weights[name][708:] = value
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        reports.append(warm_start(model, tokenizer=tokenizer, out=tmp_path / out))
    assert torch.equal(*(load_file(tmp_path / out / "model.safetensors")[name] for out in ("a", "b")))
    assert (reports[0].old_size, reports[0].copied + reports[0].dropped) == (800, 708)
    assert reports[0].copied + reports[0].drawn == reports[0].new_size == 458


def test_half_precision_stays(root: Path, tmp_path: Path) -> None:
    model = tmp_path / "half"
    shutil.copytree(root / "qwen3_asr" / "old_True", model)
    weights = {name: value.bfloat16() for name, value in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(document_of(model, "config.json") | {"dtype": "bfloat16"}))
    warm_start(model, tokenizer=root / "qwen3_asr" / "tokenizer", out=tmp_path / "out")
    new = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in new.values()} == {torch.bfloat16}
    assert all(torch.equal(value, weights[name]) for name, value in new.items() if "embed_tokens" not in name)


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "embed_tokens"), (float("inf"), "layers.1.self_attn.k_pr")])
def test_weights_that_are_not_finite_are_refused(root: Path, tmp_path: Path, value: float, name: str) -> None:
    model = tmp_path / "broken"
    shutil.copytree(root / "whisper" / "old_True", model)
    weights = load_file(model / "model.safetensors")
    full = next(key for key in weights if f"decoder.{name}" in key)
    weights[full][3, 5] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ForebayError, match=rf"{full} of .*broken has 1 of \d+ values that are NaN or infinite; load"):
        warm_start(model, tokenizer=root / "whisper" / "tokenizer", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_that_overflow_are_refused(root: Path, tmp_path: Path) -> None:
    """float16 ends at 65,504; the draw is not clipped, the run ends."""
    model = tmp_path / "wide"
    shutil.copytree(root / "whisper" / "old_True", model)
    weights = {name: value.half() for name, value in load_file(model / "model.safetensors").items()}
    [name] = [key for key in weights if "embed_tokens" in key]
    weights[name] = 60_000 * weights[name].sign()  # one drawn value of four is beyond 1.09 standard deviations
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(document_of(model, "config.json") | {"dtype": "float16"}))
    with pytest.raises(
        ForebayError, match=r"embed_tokens.weight after the warm start has .* values that are NaN or in"
    ):
        warm_start(model, tokenizer=root / "whisper" / "tokenizer", out=tmp_path / "out", seed=1)
    assert list(tmp_path.iterdir()) == [model]


def test_what_is_there_already_stays(root: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "out" / "notes.txt"):
        with pytest.raises(ConfigError, match=r"--out .* is there and not an empty folder; name a new folder"):
            warm_start(root / "whisper" / "old_True", tokenizer=root / "whisper" / "tokenizer", out=out)
    (tmp_path / "empty").mkdir()
    warm_start(root / "whisper" / "old_True", tokenizer=root / "whisper" / "tokenizer", out=tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_tokenizer_without_what_the_model_needs_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    for number, (family, tokens, message) in enumerate(
        [
            ("whisper", ("<|startoftranscript|>",), r"<\|startoftranscript\|> \(.*decoder_start_token_id"),
            ("whisper", ("<|endoftext|>", "<|startofprev|>"), r"<\|endoftext\|> \(.*; <\|startofprev\|> \(.*prev_sot_"),
            ("whisper", ("<|transcribe|>",), r'text.prompt = "whisper" needs the token <\|transcribe\|>'),
            ("qwen3_asr", ("<|audio_pad|>",), r"<\|audio_pad\|> \(Qwen3ASRConfig.audio_token_id"),
            ("qwen3_asr", ("<asr_text>",), r'text.prompt = "qwen3_asr" needs the token <asr_text>'),
            ("qwen3_vl", ("<|image_pad|>", "<|vision_start|>"), r"<\|image_pad\|> \(.*; <\|vision_start\|> \("),
        ]
    ):
        tokenizer = new_tokenizer(tmp_path / str(number), family, without=tokens)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=message) as caught:
            warm_start(root / family / "old_True", tokenizer=tokenizer, out=tmp_path / "out")
        assert str(tokenizer) in str(caught.value)
        assert not list(tmp_path.glob("out*"))
        if "lacks tokens" in str(caught.value):
            assert "add them: tokenizer.add_special_tokens" in str(caught.value)


def test_languages_that_the_tokenizer_lacks_are_dropped(root: Path, tmp_path: Path) -> None:
    tokenizer = new_tokenizer(tmp_path / "few", "whisper", without=("<|fo|>", "<|sv|>"))
    report = warm_start(root / "whisper" / "old_True", tokenizer=tokenizer, out=tmp_path / "out")
    tags = document_of(tmp_path / "out", "generation_config.json")["lang_to_id"]
    assert (report.ids_dropped, len(tags), "<|sv|>" in tags) == (3, 98, False)


def test_a_model_without_weights_or_tokenizer_is_refused(root: Path, tmp_path: Path) -> None:
    tokenizer = root / "whisper" / "tokenizer"
    with pytest.raises(
        ConfigError, match=r"model has no weights \(model.safetensors or .*, and a warm start keeps weights"
    ):
        warm_start(DEMO["whisper"], tokenizer=tokenizer, out=tmp_path / "out")
    model = tmp_path / "bare"
    shutil.copytree(root / "whisper" / "old_True", model, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ConfigError, match=r"bare: .* rows are copied by token, so put the tokenizer .* there"):
        warm_start(model, tokenizer=tokenizer, out=tmp_path / "out")


# 5 s of CPU for Whisper, which hears 30 s a clip: the one run from raw audio to a step on a new tokenizer.
@pytest.mark.parametrize(("family", "config"), [("whisper", "demo_speech"), ("qwen3_asr", "demo_qwen3_asr")])
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.few("qwen3_asr-demo_qwen3_asr")
def test_forebay_trains_from_the_folder(root: Path, tmp_path: Path, family: Family, config: str) -> None:
    model = root / family / "new_True"
    settings: dict[str, object] = {"text.tokenizer": model, "train.model": model, "run.cache_root": tmp_path / "caches"}
    settings |= {"train.output_dir": tmp_path / "runs", "train.init": "pretrained", "loader.cache": "require"}
    overrides = [f'{name}="{value}"' for name, value in settings.items()]
    overrides += ["source.max_samples=12", "train.max_steps=4", "plan.batch_seconds=20", "train.learning_rate=3e-3"]
    loaded = load_config(
        ROOT / "configs" / f"{config}.toml", overrides=[*overrides, "train.warmup_steps=0", "train.eval=[]"]
    )
    build_here(loaded)
    report = run(loaded)
    assert report is not None
    assert report.loss_last < report.loss_first
    assert report.checkpoint is not None
    vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    assert AutoTokenizer.from_pretrained(report.checkpoint).get_vocab() == vocabulary
    back = warm_start(Path(report.checkpoint), tokenizer=DEMO[family], out=tmp_path / "back")
    assert back.old_size == len(vocabulary)
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert names == {path.name for path in model.iterdir()}  # nothing of the run's state
