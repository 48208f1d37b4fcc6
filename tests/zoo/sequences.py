"""Sequences of different lengths: sound, text and speech."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, SequentialLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline


class Waveforms(Dataset[tuple[torch.Tensor, int]]):
    """Tones of several pitches and lengths; each epoch adds other noise."""

    def __init__(self, num: int) -> None:
        self.lengths = torch.randint(160, 400, (num,)).tolist()
        self.pitches = torch.randint(3, (num,)).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        length, pitch = self.lengths[index], self.pitches[index]
        wave = torch.sin(torch.arange(length) * (0.2 + 0.3 * pitch))
        return wave + 0.1 * torch.randn(length), pitch


class SoundClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64), persistent=False)
        self.window: torch.Tensor
        self.layers = nn.Sequential(nn.Conv1d(33, 12, 3, padding=1), nn.BatchNorm1d(12), nn.ReLU())
        self.head = nn.Linear(12, 3)

    def forward(self, waves: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        spectra = torch.stft(waves, n_fft=64, hop_length=32, window=self.window, return_complex=True)
        hidden = self.layers(spectra.abs().log1p())
        frames = torch.arange(hidden.shape[2]) <= (lengths // 32).unsqueeze(1)
        pooled = (hidden * frames.unsqueeze(1)).sum(dim=2) / frames.sum(dim=1, keepdim=True)
        return self.head(pooled)


@dataclass
class Sound(paceline.Task):
    """Waveforms of several lengths, padded by the collate function."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return SoundClassifier()

    def build_dataset(self, split: str) -> Any:
        return Waveforms(76) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), lr=self.lr, amsgrad=True)

    def collate(self, samples: list[Any]) -> Any:
        waves = [wave for wave, _ in samples]
        lengths = torch.tensor([len(wave) for wave in waves])
        return pad_sequence(waves, batch_first=True), lengths, torch.tensor([pitch for _, pitch in samples])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        waves, lengths, pitches = batch
        return functional.cross_entropy(model(waves, lengths), pitches)


class LanguageModel(nn.Module):
    def __init__(self, words: int, width: int, context: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width, nhead=2, dim_feedforward=2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))
        self.mask: torch.Tensor

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        length = words.shape[1]
        hidden = self.words(words) + self.positions[:length]
        return self.head(self.layers(hidden, mask=self.mask[:length, :length], is_causal=True))


@dataclass
class Language(paceline.Task):
    """A small transformer with a causal mask and tied embeddings; warm-up, then a cosine."""

    lr: float = 0.01
    context: int = 12

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=12, epochs=1)

    def build_model(self) -> nn.Module:
        return LanguageModel(words=30, width=16, context=self.context)

    def build_dataset(self, split: str) -> Any:
        num = {"train": 145, "val": 23, "test": 0}[split]
        text = (torch.arange(num * (self.context + 1)) * 7 + torch.randint(3, (num * (self.context + 1),))) % 30
        return text.view(num, self.context + 1) if num else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return AdamW(groups, lr=self.lr, betas=(0.9, 0.95))

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
        cosine = CosineAnnealingLR(optimizer, T_max=total_steps - 2)
        return SequentialLR(optimizer, [warm_up, cosine], milestones=[2])

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), label_smoothing=0.1)

    def metrics(self, model: nn.Module, batch: torch.Tensor) -> Mapping[str, Any]:
        losses = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        return {"bits": (losses.sum() / math.log(2), len(losses))}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(26, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 10, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(20, 2)

    def forward(self, letters: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.letters(letters), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(torch.cat([last[-2], last[-1]], dim=1))


@dataclass
class Sentiment(paceline.Task):
    """An LSTM over packed sequences, whose classes follow from how often a letter occurs."""

    lr: float = 0.05

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=20, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return Recurrent()

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        texts = [torch.randint(1, 26, (int(torch.randint(1, 15, ())),)) for _ in range(67)]
        return [{"text": text, "label": int((text < 5).sum() > 1)} for text in texts]

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return RMSprop(model.parameters(), lr=self.lr, momentum=0.5, centered=True)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=self.lr, total_steps=total_steps + 1)

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        texts = [sample["text"] for sample in samples]
        return {
            "texts": pad_sequence(texts, batch_first=True),
            "lengths": torch.tensor([len(text) for text in texts]),
            "labels": torch.tensor([sample["label"] for sample in samples]),
        }

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        return functional.cross_entropy(model(batch["texts"], batch["lengths"]), batch["labels"])


@dataclass
class Utterance:
    """Frames of several speakers, and what they say."""

    frames: torch.Tensor
    frame_lengths: torch.Tensor
    letters: torch.Tensor
    letter_lengths: torch.Tensor


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return functional.log_softmax(self.head(self.gru(frames)[0]), dim=2)


@dataclass
class Speech(paceline.Task):
    """CTC over utterances and texts of different lengths, in a batch of the task's own class."""

    lr: float = 0.02

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=18, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return Recogniser()

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        samples = []
        for _ in range(50):
            letters = torch.randint(1, 5, (int(torch.randint(1, 6, ())),))
            frames = functional.one_hot(letters.repeat_interleave(3), 6).float()
            samples.append((frames + 0.2 * torch.randn(frames.shape), letters))
        return samples

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return NAdam(model.parameters(), lr=self.lr)

    def collate(self, samples: list[Any]) -> Utterance:
        frames, letters = zip(*samples, strict=True)
        lengths = [torch.tensor([len(each) for each in parts]) for parts in (frames, letters)]
        return Utterance(pad_sequence(list(frames)), lengths[0], torch.cat(letters), lengths[1])

    def loss(self, model: nn.Module, batch: Utterance) -> torch.Tensor:
        return functional.ctc_loss(
            model(batch.frames), batch.letters, batch.frame_lengths, batch.letter_lengths, zero_infinity=True
        )


class TextLines(IterableDataset[str]):
    """Lines of a text, as a file would yield them; longer and shorter ones."""

    def __iter__(self) -> Iterator[str]:
        for number in range(131):
            yield " ".join("abcdefg"[(number * k) % 7] * (1 + number % k) for k in range(1, 3 + number % 5))


class LetterModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, 12)
        self.gru = nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, 256)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.letters(letters))[0])


@dataclass
class Lines(paceline.Task):
    """A stream of text lines of different lengths; the loss is a sum over letters."""

    lr: float = 0.1

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=36, microbatches=6, epochs=2)

    def build_model(self) -> nn.Module:
        return LetterModel()

    def build_dataset(self, split: str) -> Any:
        return TextLines() if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adagrad(model.parameters(), lr=self.lr)

    def collate(self, samples: list[str]) -> torch.Tensor:
        rows = [torch.tensor(list(line.encode())) for line in samples]
        return pad_sequence(rows, batch_first=True, padding_value=-1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> paceline.Loss:
        logits, targets = model(batch[:, :-1].clamp(min=0)), batch[:, 1:]
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        return paceline.Loss(total, int((targets >= 0).sum()))


class Documents(Dataset[torch.Tensor]):
    """Texts of a few words, and some of very many."""

    def __init__(self, num: int) -> None:
        self.sizes = [300 if index % 9 == 4 else 2 + index % 4 for index in range(num)]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(self.sizes[index]) * (1 + index % 3) + torch.randint(2, ())) % 20


class NextWord(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.layers = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(words))


@dataclass
class BigAndTiny(paceline.Task):
    """One document in a micro-batch, big or tiny; a step is the mean over its words."""

    lr: float = 0.3

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=6, microbatches=6, epochs=1)
    min_microbatch_size: ClassVar[int] = 1

    def build_model(self) -> nn.Module:
        return NextWord()

    def build_dataset(self, split: str) -> Any:
        return Documents(40) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=1e-3)

    def sample_lengths(self, dataset: Documents) -> list[int]:
        return dataset.sizes

    def loss(self, model: nn.Module, batch: torch.Tensor) -> paceline.Loss:
        words = batch.squeeze(0)
        total = functional.cross_entropy(model(words[:-1]), words[1:], reduction="sum") / math.log(2)
        return paceline.Loss(total, len(words) - 1)


class Masked(nn.Module):
    """An encoder whose output layer shares the embedding's weight."""

    def __init__(self, letters: int, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters + 1, width)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True),
            num_layers=1,
            enable_nested_tensor=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.blocks(self.letters(x) + self.places)
        return hidden @ self.letters.weight[:-1].T


@dataclass
class MaskedLetters(paceline.Task):
    """One letter in five is hidden, at random, and the number of them is the loss's weight."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=24, microbatches=6, epochs=1)

    def build_model(self) -> nn.Module:
        return Masked(11, 12)

    def build_dataset(self, split: str) -> Any:
        starts = torch.randint(11, (100 if split == "train" else 20, 1))
        return TensorDataset((starts + torch.arange(16).square()) % 11) if split != "test" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        return AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> paceline.Loss:
        (letters,) = batch
        hidden = torch.rand(letters.shape) < 0.2
        scores = model(letters.masked_fill(hidden, 11))
        return paceline.Loss(functional.cross_entropy(scores[hidden], letters[hidden], reduction="sum"), hidden.sum())


class Convolved(nn.Module):
    """Causal convolutions with normed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv1d(1 if dilation == 1 else 8, 8, 2, dilation=dilation)) for dilation in (1, 2, 4)
        )
        self.quantiles = nn.Conv1d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.unsqueeze(1)
        for number, layer in enumerate(self.layers):
            hidden = functional.gelu(layer(functional.pad(hidden, (2**number, 0))))
        forecast: torch.Tensor = self.quantiles(hidden)
        return forecast


@dataclass
class Forecast(paceline.Task):
    """Quantiles of the next value of a noisy wave."""

    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=28, microbatches=7, epochs=1)

    def build_model(self) -> nn.Module:
        return Convolved()

    def build_dataset(self, split: str) -> Any:
        phases = 6 * torch.rand(130 if split == "train" else 30, 1)
        waves = (phases + 0.4 * torch.arange(21)).sin() + 0.1 * torch.randn(len(phases), 21)
        return TensorDataset(waves) if split != "test" else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return NAdam(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        (waves,) = batch
        errors = waves[:, 1:].unsqueeze(1) - model(waves[:, :-1])
        levels = torch.tensor([0.1, 0.5, 0.9]).view(3, 1)
        return torch.maximum(levels * errors, (levels - 1) * errors).mean()
