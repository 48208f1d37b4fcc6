"""The data of a language model: from ``--data`` to a dataset, its digests, and what is printed of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from transformers import PreTrainedTokenizerBase

from paceline.core.errors import TaskError
from paceline.core.files import check_location, is_address
from paceline.data.order import derive_key
from paceline_lm.document_stream import DocumentStream
from paceline_lm.documents import Documents, read_documents
from paceline_lm.encoding import Encoder
from paceline_lm.mixture import Mixture, StreamMixture
from paceline_lm.packing import ConcatenatedDocuments, PackedDocuments
from paceline_lm.sources import Source, parse_sources
from paceline_lm.token_file import TokenFile
from paceline_lm.token_loss import IGNORED

Packs = PackedDocuments | ConcatenatedDocuments
Data = Documents | Packs | TokenFile | Mixture | DocumentStream | StreamMixture

_SHOWN = 1000
"""Characters of the document that is shown."""


@dataclass(kw_only=True)
class DataBuilder:
    """Builds a dataset from ``--data`` or ``--val-data``.

    Attributes:
        context: most tokens of a document, and tokens of a sample of ``bin:``.
        pack: tokens of a pack; None: documents are samples.
        tokens: of an epoch, or of a run on a stream; None: as many as the data has.
        summary: a line for each source, and the first document.
    """

    option: str
    vocabulary: int
    context: int
    pack: int | None
    concat: bool
    tokens: int | None
    tokenizer: Callable[[], PreTrainedTokenizerBase]
    digests: dict[str, str] = field(default_factory=dict)
    summary: list[str] = field(default_factory=list)

    def build(self, value: str, key: int) -> Data:
        """Build the dataset.

        Args:
            key: of the order in packs and mixtures.

        Raises:
            TaskError: the value is malformed, or a source cannot be read or does not fit the model.
        """
        sources = parse_sources(value, self.option)
        if sources[0].is_stream and self.option == "--data":  # what is evaluated is encoded once
            return self._open_streams(sources)
        if len(sources) == 1 and self.tokens is None:
            return self._read(sources[0], key, is_first=True)
        parts = [self._read(each, derive_key(key, n), is_first=n == 0) for n, each in enumerate(sources)]
        mixture = Mixture(parts, [source.weight or 1.0 for source in sources], key, self.tokens)
        tokens = [share.count * share.mean_tokens for share in mixture.shares]
        described = (
            f"{source.name} {its / sum(tokens):.1%} ({share.passes:.3g} times)"
            for source, share, its in zip(sources, mixture.shares, tokens, strict=True)
        )
        self.summary.append(
            f"an epoch has {len(mixture):,} samples, {sum(tokens):,.0f} tokens; by tokens: {', '.join(described)}"
        )
        return mixture

    def _open_streams(self, sources: Sequence[Source]) -> DocumentStream | StreamMixture:
        streams, encoder = [], Encoder(self.tokenizer(), self.context)
        for source in sources:
            if is_address(source.place):
                check_location(source.place, self.option)
            stream = DocumentStream(source.place, encoder, self.vocabulary, self.pack, concat=self.concat)
            self.digests[str(source)] = stream.digest
            self.summary.append(stream.summary)
            streams.append(stream)
        first = streams[0].first_documents[0]
        self.summary.append(_show_first(first.tokens, first.labelled, self.tokenizer()))
        data: DocumentStream | StreamMixture = streams[0]
        if len(streams) > 1:
            data = StreamMixture(streams, [source.weight or 1.0 for source in sources])
            counts = zip(sources, data.counts, strict=True)
            described = ", ".join(f"{source.name} {count / sum(data.counts):.1%}" for source, count in counts)
            self.summary.append(f"a mixture without an end; of the samples: {described}")
        if self.tokens is not None:
            data.run_samples = math.ceil(self.tokens / data.mean_tokens)
            self.summary.append(
                f"{self.tokens:,} tokens are {data.run_samples:,} samples, if all have as many as the first ones, "
                f"{data.mean_tokens:,.1f} on average"
            )
        return data

    def _read(self, source: Source, key: int, *, is_first: bool) -> Documents | Packs | TokenFile:
        files = source.files(self.option)
        many = f" ({len(files)} files)" if len(files) > 1 else ""
        if source.is_tokens:
            if self.pack is not None:
                raise TaskError("--pack is for documents; samples of --data bin:FILE are full. Give --context alone.")
            words = TokenFile(files, self.vocabulary, self.context)
            self.digests[str(source)] = words.digest
            self.summary.append(
                f"{source.name}{many}: {words.tokens:,} tokens, {len(words):,} samples of {self.context:,}"
            )
            return words
        tokenizer = self.tokenizer()
        documents = read_documents(files, tokenizer, self.context)
        if documents.counts["largest"] >= self.vocabulary:
            raise TaskError(
                f"{self.option} {source}: the tokenizer has token {documents.counts['largest']}, and the model's "
                f"vocabulary {self.vocabulary} tokens. Give a model and its own tokenizer."
            )
        self.digests[str(source)] = documents.digest
        data: Documents | Packs = documents
        if self.pack is not None:
            data = (
                ConcatenatedDocuments(documents, self.pack)
                if self.concat
                else PackedDocuments(documents, self.pack, key)
            )
        self.summary.append(_describe(f"{source.name}{many}", data, documents))
        if is_first and self.option == "--data":
            first = documents[0]
            labelled = (first["labels"] != IGNORED).tolist()
            self.summary.append(_show_first(first["input_ids"].tolist(), labelled, tokenizer))
        return data


def _describe(name: str, data: Documents | Packs, documents: Documents) -> str:
    """Describe documents in a line."""
    tokens, counts = documents.tokens, documents.counts
    parts = [f"{name}: {len(documents):,} documents, {tokens:,} tokens, {counts['labels'] / tokens:.0%} labels"]
    if counts["divided"]:
        parts.append(f"{counts['divided']:,} texts longer than --context are divided, and their pieces counted")
    if counts["unlabelled"]:
        parts.append(f"{counts['unlabelled']:,} documents without a label are left out")
    if counts["cut"]:
        lost = counts["tokens_cut"] / (tokens + counts["tokens_cut"])
        parts.append(f"{counts['cut']:,} are cut after --context tokens, which leaves out {lost:.0%} of all tokens")
    if isinstance(data, Packs):
        parts.append(f"{len(data):,} packs, {data.fill:.1%} full")
    if counts["endless"]:
        parts.append(
            f"in {counts['endless']:,} documents no special token is a label, so the model does not learn to stop: "
            "put the end of the turn inside of {% generation %}"
        )
    return "; ".join(parts)


def _show_first(tokens: list[int], labelled: list[bool], tokenizer: PreTrainedTokenizerBase) -> str:
    """Show the first document with its labels between brackets."""
    shown = ""
    for is_label, run in itertools.groupby(zip(tokens, labelled, strict=True), key=itemgetter(1)):
        text = tokenizer.decode([word for word, _ in run])
        shown += f"[{text}]" if is_label else text
    return f"the first document, labels in []: {shown[:_SHOWN]}{'...' if len(shown) > _SHOWN else ''}"
