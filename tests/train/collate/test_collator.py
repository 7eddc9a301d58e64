from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.pretrained import from_folder
from forebay.steps.batch import PIECE, copy_values, raw_values
from forebay.steps.form_values import raw
from forebay.store.layout import Array
from forebay.train.collate.collator import Collator
from forebay.train.prefetch import BufferRing
from tests.flat_constants import flat
from tests.train.fake_source import AUDIO_TOKEN_ID, PAD_TOKEN_ID, FakeSource, plain_batch

DEMO = Path(__file__).parents[3] / "demo" / "speech"

KINDS = [
    ("log_mel", "whisper", "float16"),
    ("log_mel", "plain", "float32"),
    ("qwen3_asr", "qwen3_asr", "float16"),
    ("qwen3_asr", None, "float32"),
    ("waveform", "plain", "int16"),
    ("waveform", None, "float32"),
    ("w2v_bert", "plain", "float32"),
    ("w2v_bert", None, "float16"),
    ("none", "plain", "float32"),
]


def assert_batches_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], *, rtol: float = 0) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value) or torch.allclose(found[name], value, rtol=rtol, atol=rtol), name


def rounding(source: FakeSource, dtype: torch.dtype) -> float:
    """Returns how far batches may be from the plain loop's: only w2v_bert computes, and sums in another order."""
    return max(1e-5, 2 * torch.finfo(dtype).eps) if source.constants["features"] == "w2v_bert" else 0


@st.composite
def ragged(draw: st.DrawFn, kinds: Sequence[tuple[str, str | None, str]] = KINDS) -> FakeSource:
    features, prompt, dtype = draw(st.sampled_from(kinds))
    longest = 3000 if features != "waveform" else 20_000
    lengths = draw(st.lists(st.integers(5, 40) | st.integers(5, longest), min_size=1, max_size=5))
    return FakeSource(lengths, features=features, prompt=prompt, dtype=dtype, seed=draw(st.integers(0, 99)))


@given(source=ragged(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), side=st.booleans())
def test_batches_are_those_of_a_plain_loop_and_share_no_memory_with_the_source(
    source: FakeSource, dtype: torch.dtype, *, side: bool
) -> None:
    padding_side: Literal["left", "right"] = "left" if side else "right"
    collator = Collator(source, dtype=dtype, padding_side=padding_side)
    indices = list(range(len(source)))
    batch = collator([source.read(index) for index in indices])
    wanted = plain_batch(source, indices, dtype=dtype, padding_side=padding_side)
    assert_batches_equal(batch, wanted, rtol=rounding(source, dtype))
    for tensor in batch.values():
        raw = tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
        for sample in source.samples:
            assert not any(np.shares_memory(raw, stored) for stored in sample.values())
        # A write through an alias of a mapping would be a SIGSEGV; here it would raise or change the source.
        tensor.zero_()


@given(source=ragged(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_every_element_of_reused_memory_is_written(source: FakeSource, dtype: torch.dtype) -> None:
    ring = BufferRing(max_free=8, least_bytes=0)

    def poisoned(name: str, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        tensor = ring.take(name, shape, dtype=dtype)
        return tensor.fill_(77 if not dtype.is_floating_point else torch.nan)

    samples = [source.read(index) for index in range(len(source))]
    batch = Collator(source, dtype=dtype).collate(samples, allocate=poisoned)
    wanted = plain_batch(source, range(len(source)), dtype=dtype)
    assert_batches_equal(batch, wanted, rtol=rounding(source, dtype))


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_qwen3_asr_labels_hold_the_target_whatever_the_side(padding_side: str) -> None:
    source = FakeSource([30, 500, 101], features="qwen3_asr", prompt="qwen3_asr")
    batch = Collator(source, padding_side=padding_side)([source.read(i) for i in range(3)])  # type: ignore[arg-type]
    for i, sample in enumerate(source.samples):
        target = sample["input_ids"][sample["prefix_len"][0] :].tolist()
        row = batch["labels"][i]
        assert row[row != -100].tolist() == target
        assert batch["input_ids"][i][row != -100].tolist() == target
        assert target[-1] == PAD_TOKEN_ID  # masked by position: a pad id that is a target stays one
        mask = batch["attention_mask"][i]
        assert int(mask.sum()) == len(sample["input_ids"]) - 1 + int((batch["input_ids"][i] == AUDIO_TOKEN_ID).sum())
        edge = mask[-1] if padding_side == "left" else mask[0]
        assert edge == 1


def test_count_frames_says_what_is_padding() -> None:
    whisper = FakeSource([100, 300], features="log_mel", prompt=None)
    assert Collator(whisper).count_frames(whisper.samples) == (400, 6000)
    qwen = FakeSource([100, 201], features="qwen3_asr", prompt=None)
    assert Collator(qwen).count_frames(qwen.samples) == (301, 600)
    wave = FakeSource([50, 80], features="waveform", prompt=None, dtype="int16")
    assert Collator(wave).count_frames(wave.samples) == (130, 160)


def test_collators_are_pickled_for_worker_processes() -> None:
    source = FakeSource([40, 50])
    copy = pickle.loads(pickle.dumps(Collator(source, dtype=torch.bfloat16)))  # noqa: S301 - our own bytes
    assert_batches_equal(copy(source.samples), plain_batch(source, [0, 1], dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "mfcc"}, "no batch form for features 'mfcc'"),
        ({"features": None}, "has no features, which its batches need; rebuild it: forebay preprocess"),
        ({"prompt": "chat"}, "no batch form for prompt 'chat'"),
        ({"pad_token_id": None}, "has no pad_token_id"),
        ({"prompt": "qwen3_asr"}, "audio.features is 'log_mel'"),
    ],
)
def test_constants_that_give_no_batch_are_refused(changes: dict[str, Any], message: str) -> None:
    source = FakeSource([10])
    source.constants = flat(**{**source.constants, **changes})
    with pytest.raises(ConfigError, match=message):
        Collator(source)


def test_settings_that_give_no_batch_are_refused() -> None:
    source = FakeSource([10])
    with pytest.raises(ConfigError, match=r"dtype of batches is torch\.int8"):
        Collator(source, dtype=torch.int8)
    with pytest.raises(ConfigError, match="padding_side is 'top'"):
        Collator(source, padding_side="top")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one sample"):
        Collator(source)([])


@given(
    size=st.integers(0, 70_000),
    stored=st.sampled_from([np.float16, np.float32]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_copies_round_as_torch_does_and_take_read_only_memory(size: int, stored: type, dtype: torch.dtype) -> None:
    values: Array = np.random.default_rng(size).normal(size=size).astype(stored)
    expected = torch.from_numpy(values.astype(np.float32)).to(dtype)
    values.flags.writeable = False
    out = torch.empty(size + 1, dtype=dtype)
    raw(out)[:] = raw_values([0.3], dtype)[0]
    copy_values(values, out[:size], scratch=torch.empty(PIECE))
    assert torch.equal(out[:size], expected)
    assert out[size] == torch.tensor(0.3, dtype=dtype)
    assert not values.flags.writeable


def test_moved_features_are_the_stored_ones_and_padding() -> None:
    whisper = FakeSource([1, 700, 3000], features="log_mel", prompt=None)
    for row, sample in zip(Collator(whisper)(whisper.samples)["input_features"], whisper.samples, strict=True):
        out = np.full((80, 3000), sample["pad_value"][0], dtype=np.float32)
        out[:, : len(sample["input_features"])] = sample["input_features"].T
        assert np.array_equal(row.numpy(), out)
    qwen = FakeSource([1, 100, 731], features="qwen3_asr", prompt=None)
    batch = Collator(qwen)(qwen.samples)
    for row, mask, sample in zip(batch["input_features"], batch["input_features_mask"], qwen.samples, strict=True):
        out, mask_out = np.zeros((128, 800), dtype=np.float32), np.zeros(800, dtype=np.int32)
        out[:, : len(sample["input_features"])] = sample["input_features"].T
        mask_out[: len(sample["input_features"])] = 1
        assert np.array_equal(row.numpy(), out)
        assert np.array_equal(mask.numpy(), mask_out)


# Against transformers


def test_whisper_inputs_are_the_labels_shifted_right_and_train_a_model() -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration
    from transformers.models.whisper.modeling_whisper import shift_tokens_right

    source = FakeSource([100, 250, 3000], features="log_mel", prompt="whisper")
    batch = Collator(source)(source.samples)
    whole = torch.full((3, batch["labels"].shape[1]), PAD_TOKEN_ID)
    for row, sample in zip(whole, source.samples, strict=True):
        row[: len(sample["input_ids"]) - 1] = torch.from_numpy(sample["input_ids"][1:].copy())
    for i, sample in enumerate(source.samples):
        length = len(sample["input_ids"]) - 1
        shifted = shift_tokens_right(whole[i : i + 1], PAD_TOKEN_ID, int(sample["input_ids"][0]))
        assert torch.equal(batch["decoder_input_ids"][i, :length], shifted[0, :length])
    config = WhisperConfig(
        vocab_size=1000, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=1,
        decoder_attention_heads=1, encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=PAD_TOKEN_ID,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    loss = WhisperForConditionalGeneration(config)(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)


@pytest.fixture(scope="module")
def spoken() -> tuple[Any, list[np.ndarray[Any, Any]], list[str], FakeSource]:
    """The demo's Qwen3-ASR processor, three clips with their prompts, and a source of what it gives for each alone."""
    from transformers import AutoProcessor

    processor = from_folder(AutoProcessor, DEMO / "qwen3_asr_model")
    rng = np.random.default_rng(0)
    # Whole numbers of hops: for others the extractor counts a frame more in a batch than alone.
    clips = [rng.normal(size=size).astype(np.float32) * 0.1 for size in (8_960, 16_000, 40_000)]
    texts = ["one", "two and three", "a longer sentence than the others"]
    prompts = [f"<|audio_start|><|audio_pad|><|audio_end|>{text}<|im_end|>" for text in texts]
    source = FakeSource([2] * 3, features="qwen3_asr", prompt="qwen3_asr", dtype="float32")
    source.constants = flat(**{**source.constants, "pad_token_id": processor.tokenizer.pad_token_id})
    source.samples = [_qwen3_asr_fields(processor, clip, prompt) for clip, prompt in zip(clips, prompts, strict=True)]
    return processor, clips, prompts, source


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_qwen3_asr_batches_are_the_processors(spoken: Any, padding_side: Any) -> None:
    processor, clips, prompts, source = spoken
    batch = Collator(source, padding_side=padding_side)(source.samples)
    wanted = processor(
        text=prompts, audio=clips, sampling_rate=16_000, padding=True, padding_side=padding_side, output_labels=True
    )
    assert sorted(set(wanted) - {"num_audio_tokens"}) == sorted(batch)
    for name in ("input_ids", "attention_mask", "input_features_mask"):
        assert batch[name].dtype == wanted[name].dtype, name
        assert torch.equal(batch[name], wanted[name]), name
    # The processor masks the audio and every pad id; ours also masks the rest of the prompt, and by position.
    learnt = batch["labels"] != -100
    assert torch.equal(batch["labels"][learnt], wanted["labels"][learnt])
    lengths = batch["input_features_mask"].sum(1).tolist()
    for found, expected, length in zip(batch["input_features"], wanted["input_features"], lengths, strict=True):
        assert found.shape == expected.shape
        # Alone a clip's end is mirrored, in a batch its neighbours' padding follows: two frames see the difference.
        assert torch.allclose(found[:, : length - 2], expected[:, : length - 2], atol=1e-5)


def test_qwen3_asr_batches_train_a_model_alike_on_both_sides(spoken: Any) -> None:
    from transformers import AutoConfig, Qwen3ASRForConditionalGeneration

    source = spoken[3]
    torch.manual_seed(0)
    config = from_folder(AutoConfig, DEMO / "qwen3_asr_model")
    model = Qwen3ASRForConditionalGeneration(config).eval()
    right = model(**Collator(source, padding_side="right")(source.samples)).loss
    left = model(**Collator(source, padding_side="left")(source.samples)).loss
    right.backward()
    assert torch.isfinite(right)
    assert torch.allclose(left, right, rtol=1e-4)


def _qwen3_asr_fields(processor: Any, clip: np.ndarray[Any, Any], prompt: str) -> dict[str, np.ndarray[Any, Any]]:
    features = processor.feature_extractor(clip, sampling_rate=16_000, padding=True, return_attention_mask=True)
    count = int(features["attention_mask"].sum())
    ids = processor.tokenizer(prompt)["input_ids"]
    return {
        "input_features": features["input_features"][0].numpy().T[:count].copy(),
        "input_ids": np.array(ids, dtype=np.int32),
        "prefix_len": np.array([3], dtype=np.int32),
        "audio_index": np.array([1], dtype=np.int32),
    }
