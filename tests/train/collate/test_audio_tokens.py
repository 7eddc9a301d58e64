from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoProcessor, Qwen3ASRForConditionalGeneration
from transformers.models.qwen3_asr.modeling_qwen3_asr import _get_feat_extract_output_lengths

from forebay.pretrained import from_folder
from forebay.steps.text.qwen3_asr_prompt import num_audio_tokens

MODEL = Path(__file__).resolve().parents[3] / "demo" / "speech" / "qwen3_asr_model"


def test_equals_the_processor_and_the_model_for_every_length() -> None:
    frames = np.arange(3501)
    ours = num_audio_tokens(frames)
    processor = from_folder(AutoProcessor, MODEL)
    np.testing.assert_array_equal(ours, np.asarray(processor._get_audio_token_length(torch.from_numpy(frames))))
    np.testing.assert_array_equal(ours, _get_feat_extract_output_lengths(torch.from_numpy(frames)).numpy())


def test_an_int_gives_the_int_that_an_array_holds() -> None:
    for frames in (0, 1, 8, 99, 100, 101, 3000):
        assert num_audio_tokens(frames) == num_audio_tokens(np.array([frames]))[0]
        assert isinstance(num_audio_tokens(frames), int)


def test_the_encoder_fills_exactly_so_many_placeholders() -> None:
    config = from_folder(AutoConfig, MODEL)
    model = Qwen3ASRForConditionalGeneration(config).eval()
    for frames in (1, 7, 50, 99, 100, 101, 333):
        padded = -(-frames // 100) * 100
        mask = (torch.arange(padded) < frames).long()[None]
        ids = torch.full((1, num_audio_tokens(frames)), config.audio_token_id)
        with torch.no_grad():  # the model refuses placeholders that are more or fewer than the encoder's outputs
            logits = model(input_ids=ids, input_features=torch.zeros(1, 128, padded), input_features_mask=mask).logits
        assert logits.shape == (1, num_audio_tokens(frames), config.text_config.vocab_size)
