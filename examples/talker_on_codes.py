"""Trains a language model that speaks: texts, then the codec tokens of their recordings, which a cache holds.

python examples/talker_on_codes.py talker.toml [section.field=value ...]

`talker.toml` has `[text]` with prompt = "tts" and a `[[model]]` that is a codec (docs/model-steps.md). Its
`[loader] tokens` says how codes become tokens, for 64 codes: {codes = {delay = 1, bos = 64, eos = 65, pad = 66}}.
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaModel

import forebay


class Talker(nn.Module):
    """Predicts the tokens of all codebooks of the next frame, after MusicGen's delay pattern (arXiv 2306.05284)."""

    def __init__(self, *, num_texts: int, num_tokens: int, num_codebooks: int, size: int = 64) -> None:
        super().__init__()
        self.shape = (num_codebooks, num_tokens)
        sizes = {"hidden_size": size, "intermediate_size": 2 * size, "num_attention_heads": 2, "num_hidden_layers": 2}
        self.backbone = LlamaModel(LlamaConfig(vocab_size=num_texts, **sizes))
        self.spoken = nn.ModuleList(nn.Embedding(num_tokens, size) for _ in range(num_codebooks))
        self.heads = nn.Linear(size, num_codebooks * num_tokens)

    def forward(self, batch: dict[str, torch.Tensor], *, pad: int) -> torch.Tensor:
        """Returns the loss of a batch: `input_ids`, `input_lengths`, and `codes` [batch, frames, codebooks]."""
        texts, codes, mask = batch["input_ids"], batch["codes"], batch["codes_mask"]
        read = torch.arange(texts.shape[1]) < batch["input_lengths"][:, None]
        frames = sum(embed(codes[:, :-1, book]) for book, embed in enumerate(self.spoken))
        inputs = torch.cat([self.backbone.embed_tokens(texts), frames], dim=1)
        attended = torch.cat([read, mask[:, :-1].bool()], dim=1)
        states = self.backbone(inputs_embeds=inputs, attention_mask=attended).last_hidden_state
        logits = self.heads(states[:, texts.shape[1] :]).unflatten(-1, self.shape)
        wanted = codes[:, 1:]
        return cross_entropy(logits.flatten(0, 2), wanted.masked_fill(wanted == pad, -100).flatten())


def main(config_path: str, overrides: list[str]) -> list[float]:
    """Trains `train.max_steps` steps; returns the losses."""
    config = forebay.load_config(config_path, overrides=overrides)
    forebay.preprocess.build(config)
    loader = forebay.train.make_loader(config)
    pattern = config.loader.tokens["codes"]
    torch.manual_seed(config.loader.seed)
    talker = Talker(
        num_texts=loader.source.constants["vocab_size"],
        num_tokens=pattern.pad + 1,  # the last one
        num_codebooks=loader.source.fields["codes"].shape[0],
    )
    optimizer = torch.optim.AdamW(talker.parameters(), lr=config.train.learning_rate)
    losses = []
    epochs = itertools.chain.from_iterable(loader for _ in itertools.count())
    for step, batch in enumerate(itertools.islice(epochs, config.train.max_steps), start=1):
        loss = talker(batch, pad=pattern.pad) * loader.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {loss.item():.3f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
