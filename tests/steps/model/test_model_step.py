"""The key of a model is the content of its folder; what is wrong with it is said before the first shard."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import soundfile
import torch

import forebay
from forebay import cli
from forebay.errors import ConfigError, ForebayError
from forebay.preprocess.build_report import BuildReport
from forebay.preprocess.model_inputs import too_large
from forebay.steps.form import FieldForm
from forebay.steps.model.frozen_families import receptive_field
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.train import make_loader
from tests.preprocess.here_pool import build_here
from tests.steps.model.test_families import SPEECH, Corpus, section
from tests.steps.model.tiny_frozen import RATE_HZ, save_tiny


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus(tmp_path, "dac", "t5")


def built(corpus: Corpus, *sections: str) -> tuple[BuildReport, Cache]:
    report = build_here(corpus.config(SPEECH + "".join(sections)))
    return report, open_cache(report.cache)


CODES, WORDS = section("dac", "audio"), section("t5", "text")


def edit_weights(folder: Path, change: Callable[[torch.Tensor], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    change(next(tensor for name, tensor in sorted(tensors.items()) if tensor.is_floating_point()))
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def flip_a_bit(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.int32)[0] ^= 1


def test_any_change_is_another_key_and_makes_only_what_depends_on_it(corpus: Corpus) -> None:
    first, _ = built(corpus, CODES, WORDS)  # shards: lengths, codes, states, text
    assert (first.shards_written, first.shards_linked) == (4, 0)
    keys = {first.key}

    edit_weights(corpus.folder / "t5", flip_a_bit)
    again, _ = built(corpus, CODES, WORDS)
    assert (again.shards_written, again.shards_linked) == (1, 3)
    keys.add(again.key)

    rows = corpus.folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace("two words", "two wordz"))
    again, _ = built(corpus, CODES, WORDS)  # the manifest is a source: its rows are cut anew, recordings are the same
    assert again.shards_written == 2
    keys.add(again.key)

    again, _ = built(corpus, CODES, WORDS.replace('takes = "text"', 'takes = "text"\ndtype = "bfloat16"'))
    assert again.shards_written == 1
    keys.add(again.key)

    again, _ = built(corpus, CODES.replace('takes = "audio"', 'takes = "audio"\nargs = {n_quantizers = 2}'), WORDS)
    assert again.shards_written == 1  # the states of these captions are of the build before the last
    keys.add(again.key)

    clip = corpus.folder / "1.wav"
    data = bytearray(clip.read_bytes())
    data[-1] ^= 1
    clip.write_bytes(bytes(data))
    again, _ = built(corpus, CODES, WORDS)
    keys.add(again.key)
    assert len(keys) == 6


def test_a_training_node_needs_no_weights(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    _, cache = built(corpus, CODES)
    digest = recipe_of(corpus.config(SPEECH + CODES)).models[0].step.digest
    assert cli.main(["key", str(corpus.folder / "config.toml")]) == 0
    assert f'model:      dac: digest = "{digest}"' in capsys.readouterr().out

    shutil.rmtree(corpus.folder / "dac")
    with pytest.raises(ConfigError, match="is no folder; name one with"):
        recipe_of(corpus.config(SPEECH + CODES))
    there = corpus.config(SPEECH + CODES + f'digest = "{digest}"\n[loader]\ncache = "require"\n')
    loader = make_loader(there)
    loader.set_epoch(0)
    assert sum(len(batch["dac"]) for batch in loader) == len(cache)


def test_a_digest_must_be_that_of_a_folder_that_is_there(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=f"digest is {'0' * 16}, and .* has [0-9a-f]{{16}}; correct one"):
        recipe_of(corpus.config(SPEECH + CODES + f'digest = "{"0" * 64}"\n'))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def of_code(folder: Path) -> None:
    _edit(folder, auto_map={"AutoModel": "code.Model"})


def of_a_kernel(folder: Path) -> None:
    _edit(folder, _attn_implementation="kernels/anybody")


def unknown(folder: Path) -> None:
    _edit(folder, model_type="nobody_knows")


def torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def half(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors[min(tensors)]
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def _edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (pickled, "has pickled weights alone, which run code; save them as safetensors"),
        (gone, r"has no weights \(\*.safetensors\)"),
        (of_code, "names code of its own"),
        (of_a_kernel, "code that transformers would fetch and run"),
        (unknown, "is of 'nobody_knows', and models that take audio are dac, data2vec-audio, encodec"),
        (torn, "cannot open"),
        (half, "lacks 1 weights of DacModel, .* its values would be random"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(corpus: Corpus, spoil: Callable[[Path], None], message: str) -> None:
    spoil(corpus.folder / "dac")
    with pytest.raises(ForebayError, match=message):
        built(corpus, CODES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("args = {bandwidth = 6.0}", "bandwidth is no argument of encode here; wanted n_quantizers"),
        ("layer = 2", "encode gives no layers"),
        ('call = "encod"', "DacModel has no encod; leave it out for encode"),
        ('keep = {codes = {output = "sounds"}}', "gives no sounds; it gives audio_codes"),
        ('takes = "image"', "is of 'dac', and models that take image are AutoencoderKL, clip, clip_vision_model"),
        ('name = "audio"', "name is 'audio'"),
        ("batch = 0", "batch is 0"),
        ("outputs = 3", "unknown field"),
        ('keep = {codes = {outputs = "audio_codes"}}', "did you mean .*output"),
    ],
)
def test_a_section_that_cannot_be_is_refused(corpus: Corpus, line: str, message: str) -> None:
    named = line.partition(" ")[0]
    kept = "".join(row for row in CODES.splitlines(keepends=True) if not row.startswith(named))
    with pytest.raises(ForebayError, match=message):
        built(corpus, f"{kept}{line}\n")


def test_two_models_of_a_name_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match="model: 2 models are called 'dac'"):
        built(corpus, CODES, CODES)


@pytest.mark.parametrize("takes", ['"text"', '["image", "text"]'])
@pytest.mark.parametrize(
    ("talks", "said"),
    [
        ('meaning = "conversations"\n', r"source.meaning is conversations\)"),
        ('[vision]\nprocessor = "t5"\n', "source.meaning is conversations and text.prompt chat"),
        (
            'meaning = "talk.py:Talk"\n[vision]\nprocessor = "t5"\n',
            "source.meaning is talk.py:Talk and text.prompt chat",
        ),
    ],
)
def test_the_messages_of_conversations_are_no_text(tmp_path: Path, talks: str, said: str, takes: str) -> None:
    (tmp_path / "talk.py").write_text('class Talk:\n    columns = ("text", "image")\n    groups = ("image",)\n')
    head = 'name = "talks"\n[source]\nkind = "jsonl"\nmanifest = "rows.jsonl"\n'
    text = f"{head}{talks}{WORDS.replace(chr(34) + 'text' + chr(34), takes)}[run]\nallow_code = true\n"
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(
        ConfigError, match=f"model.t5 takes the text of a row, .*{said}.*as JSON. Make a config"
    ) as caught:
        forebay.load_config(tmp_path / "config.toml")
    assert caught.value.code == "FB147"


def test_values_that_are_not_finite_cost_their_sample(corpus: Corpus) -> None:
    edit_weights(corpus.folder / "t5", lambda tensor: tensor.fill_(float("inf")))
    with pytest.raises(ForebayError, match=r"not_finite: model\.t5: t5 holds nan, which float16 does not"):
        built(corpus, WORDS)


def test_an_empty_text_costs_its_sample(corpus: Corpus) -> None:
    rows = corpus.folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace("two words", " "))
    report, cache = built(corpus, WORDS)
    assert report.excluded == {"empty_text": 1}
    assert len(cache) == 4


def test_a_clip_without_a_frame_costs_its_sample(corpus: Corpus) -> None:
    save_tiny("hubert", corpus.folder / "hubert")
    field = receptive_field(json.loads((corpus.folder / "hubert" / "config.json").read_text()))
    for name, count in (("1", field - 1), ("2", field)):
        soundfile.write(corpus.folder / f"{name}.wav", np.zeros(count, np.int16), RATE_HZ)
    report, cache = built(corpus, section("hubert", "audio"))
    assert report.excluded == {"too_short": 1}
    lengths = {cache.sample_id(index): int(cache.lengths["num_hubert"][index]) for index in range(len(cache))}
    assert lengths["2"] == 1
    assert "1" not in lengths


def test_two_outputs_a_layer_and_a_batch(corpus: Corpus) -> None:
    kept = "first = {output = 'last_hidden_state', dtype = 'float32'}, one = {output = 'mean'}"
    more = f"layer = 1\nbatch = 2\nkeep = {{{kept}}}"
    _, cache = built(corpus, section("t5", "text", more))
    assert {
        name: spec.dtype for name, spec in cache.fields.items() if spec.group == "t5" and spec.role == "tensor"
    } == {
        "first": "float32",
        "one": "float16",
    }
    sample = cache.read(0)
    (first,), (mean,) = sample["first"], sample["one"]
    np.testing.assert_allclose(first.mean(axis=0), mean.reshape(-1), atol=2e-3)
    assert cache.constants.of("t5")["model"].endswith("in batches of 2")


def test_on_the_fly_it_is_the_same(corpus: Corpus) -> None:
    built(corpus, CODES, WORDS)
    batches = []
    for mode in ("require", "off"):
        loader = make_loader(forebay.load_config(corpus.folder / "config.toml", overrides=[f"loader.cache={mode}"]))
        loader.set_epoch(0)
        batches.append([{name: value.clone() for name, value in batch.items()} for batch in loader])
    for cached, made in zip(*batches, strict=True):
        assert torch.equal(cached["dac"], made["dac"])
        assert torch.equal(cached["dac_mask"], made["dac_mask"])
        torch.testing.assert_close(cached["t5"], made["t5"], atol=2e-3, rtol=2e-3)


def test_where_a_clip_is_cut_is_in_the_key_of_its_shard(corpus: Corpus) -> None:
    frames = []
    for most_s in (0.9, 0.4):
        limits = f'max_duration_s = {most_s}\noverlong = "clip"\n'
        config = corpus.config(SPEECH.replace("[plan]", f"{limits}[plan]") + CODES)
        frames.append(int(open_cache(build_here(config).cache).lengths["num_dac"].max()))
    assert frames[0] > frames[1]


def test_codes_beyond_the_codebook_are_told_from_codes() -> None:
    form = {"codes": FieldForm(name="codes", dtype="int64", shape=(None, 2), stored_dtype="uint8")}
    assert too_large({"codes": np.array([[0, 255]])}, form) is None
    assert too_large({"codes": np.array([[0, 256]])}, form) == "codes holds 256, which uint8 does not"
    assert too_large({"codes": np.array([[-1, 3]])}, form) == "codes holds -1, which uint8 does not"
    assert too_large({"codes": np.zeros((0, 2), np.int64)}, form) is None
