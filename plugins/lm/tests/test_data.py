"""Documents with their labels, packs of them, and files of tokens."""

from __future__ import annotations

import copy
import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from plugins.lm.tests.directories import CHATML, TEXTS, build_tiny, train_tokenizer, write_lines
from tokenizers.processors import TemplateProcessing
from trl import SFTConfig, SFTTrainer, pack_dataset

import paceline
from paceline_lm.documents import Documents, read_documents
from paceline_lm.encoding import Encoder
from paceline_lm.mixture import Mixture
from paceline_lm.packing import ConcatenatedDocuments, PackedDocuments, count_packs, plan_packs
from paceline_lm.sources import parse_sources
from paceline_lm.token_file import TokenFile

pytestmark = pytest.mark.matrix

MARKED = CHATML.replace(
    "{{ m.content }}<|im_end|>\n",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
)


def chat(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]}


def labelled_text(record: dict[str, Any], template: str = CHATML, context: int = 64) -> str:
    tokenizer = train_tokenizer()
    tokenizer.chat_template = template
    [(tokens, labelled, _)] = Encoder(tokenizer, context)(record)
    return str(tokenizer.decode([token for token, mark in zip(tokens, labelled, strict=True) if mark]))


def test_labels_are_answers_completions_and_whole_texts() -> None:
    assert labelled_text(chat("Who?", "She.", "And?", "He sees.")) == "She.<|im_end|>\nHe sees.<|im_end|>\n"
    assert labelled_text({"prompt": "Who? ", "completion": "She."}) == "She.<|im_end|>"
    assert labelled_text({"text": "She sees"}) == " sees<|im_end|>"  # "She" is the first token
    first = chat("Who?")["messages"]
    answer = {"prompt": first, "completion": [{"role": "assistant", "content": "He."}]}
    assert labelled_text(answer) == "He.<|im_end|>\n"
    assert labelled_text(chat("Who is it?", "She."), context=6) == ""


def test_answers_without_an_end_are_counted(tmp_path: Path) -> None:
    records = [chat("Who?", "She."), {"text": "He sees the hat."}]
    write_lines(tmp_path / "data.jsonl", records)
    found = []
    for template in (MARKED, MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")):
        tokenizer = train_tokenizer()
        tokenizer.chat_template = template
        found.append(read_documents([tmp_path / "data.jsonl"], tokenizer, 64).counts["endless"])
    assert found == [0, 1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_masks_are_those_of_trl_with_marked_answers(tmp_path: Path) -> None:
    records = [chat("Who?", "She.", "And?", "He sees the hat."), chat("What? \u00e4\u20ac", "The cup.")]
    tokenizer = train_tokenizer()
    unmarked = [Encoder(tokenizer, 64)(record)[0] for record in records]
    tokenizer.chat_template = MARKED
    assert [Encoder(tokenizer, 64)(record)[0] for record in records] == unmarked
    trainer = SFTTrainer(
        build_tiny("llama", len(tokenizer)),
        SFTConfig(str(tmp_path), assistant_only_loss=True, max_length=64, report_to=[], use_cpu=True),
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    for row, (tokens, labelled, _) in zip(trainer.train_dataset, unmarked, strict=True):
        assert row["input_ids"] == tokens
        assert [label != -100 for label in row["labels"]] == labelled


def test_a_template_that_rewrites_earlier_answers_is_refused_unless_it_marks_them() -> None:
    rewriting = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")
    with pytest.raises(paceline.TaskError, match=r"Put {% generation %} and {% endgeneration %} around answers"):
        labelled_text(chat("Who?", "She.", "And?", "He."), rewriting)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: this is not JSON"),
        ("1", r"line 2: this is not a JSON object"),
        ('[{"text": "a"}]', r"line 2: this is a JSON array; .* jq -c"),
        ('{"txt": "a"}', r"line 2: a record needs \"messages\" .* this one has 'txt'"),
        ('{"messages": [{"content": 1}]}', r"line 2: a message must be an object with \"role\""),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "She"}\n' + line + "\n")
    tokenizer = train_tokenizer()
    tokenizer.chat_template = "{{ messages[0].role.upper() }}"
    with pytest.raises(paceline.TaskError, match=message):
        read_documents([tmp_path / "a.jsonl"], tokenizer, 8)


CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
WITH_TOOLS = "{{ tools }}" + CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")


@pytest.mark.parametrize(
    ("answer", "tools", "message"),
    [
        ({"content": "", "tool_calls": [CALL]}, [], r'ignores "tool_calls"'),
        ({"content": "She."}, [CALL], r'ignores "tools"'),
        ({"content": [{"type": "text", "text": "She."}]}, [], r"a list of parts"),
        ({"content": "She.", "weight": 0}, [], r'"prompt", and the answer as "completion"'),
        ({"content": "She.", "train": False}, [], r'"prompt", and the answer as "completion"'),
    ],
)
def test_what_a_template_drops_is_refused(answer: dict[str, Any], tools: list[Any], message: str) -> None:
    messages = [*chat("Who?")["messages"], {"role": "assistant", **answer}]
    for template in (CHATML, MARKED):
        with pytest.raises(paceline.TaskError, match=message):
            labelled_text({"messages": messages, "tools": tools}, template)


def test_a_template_with_tools_gets_them() -> None:
    messages = [*chat("Who?")["messages"], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert "look" in labelled_text({"messages": messages, "tools": [CALL]}, WITH_TOOLS, context=512)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_control_token_that_a_user_types_is_text(template: str) -> None:
    tokenizer = train_tokenizer()
    tokenizer.chat_template = template
    record = chat("Who?", "She.", "<|im_end|>", "He.", " is it<|im_end|> ?", "He.")
    [tame] = Encoder(tokenizer, 99)(chat("Who?", "She.", "a", "He.", "is it ?", "He."))
    [found] = Encoder(tokenizer, 99)(record)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert found.tokens.count(end) == tame.tokens.count(end) == 6
    assert tokenizer.decode(found.tokens) == tokenizer.apply_chat_template(record["messages"], tokenize=False)
    labels = [tokenizer.decode([w for w, m in zip(*each[:2], strict=True) if m]) for each in (found, tame)]
    assert labels[0] == labels[1]
    tokenizer.chat_template = template.replace("{{ m.content }}", "{{ m.content | replace('i', 'j') }}", 1)
    if template == CHATML:
        with pytest.raises(paceline.TaskError, match=r"contains '<|im_end|>', which is a control token"):
            Encoder(tokenizer, 99)(record)


def test_a_text_that_begins_with_the_start_token_gets_no_second_one() -> None:
    tokenizer = train_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    encode = Encoder(tokenizer, 64)
    assert encode({"text": "<|im_start|>She"}) == encode({"text": "She"})
    assert encode({"text": "She"})[0].tokens.count(start) == 1


def test_a_compressed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "She"}'))
    with pytest.raises(paceline.TaskError, match="gunzip it first"):
        read_documents([tmp_path / "a.jsonl"], train_tokenizer(), 8)


def test_documents_are_encoded_once_until_something_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in [*TEXTS, ""]] + [chat("x " * 8, "Yes")])
    tokenizer = train_tokenizer()
    documents = read_documents([file], tokenizer, 16)
    assert (len(documents), documents.counts["unlabelled"]) == (len(TEXTS), 2)
    assert documents[0]["labels"][0] == -100
    assert torch.equal(documents[0]["labels"][1:], documents[0]["input_ids"][1:])
    again: Documents = copy.copy(documents)
    assert torch.equal(again[3]["input_ids"], documents[3]["input_ids"])
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patched:
        patched.setattr(Encoder, "__call__", None)
        assert read_documents([file], tokenizer, 16).digest == documents.digest
    with monkeypatch.context() as patched:
        patched.setattr("paceline_lm.documents._FORMAT", 999)  # encoded again, to the same tokens
        assert read_documents([file], tokenizer, 16).digest == documents.digest
    assert len(list(cache.iterdir())) == 2
    assert read_documents([file], tokenizer, 4).digest != documents.digest
    tokenizer.chat_template = MARKED
    read_documents([file], tokenizer, 16)
    assert len(list(cache.iterdir())) == 4
    write_lines(tmp_path / "b.jsonl", [{"text": ""}])
    with pytest.raises(paceline.TaskError, match=r"none of its 1 documents has a token to learn"):
        read_documents([tmp_path / "b.jsonl"], tokenizer, 16)


@pytest.mark.parametrize("attempts", [8, 0])
def test_each_document_is_in_one_pack_and_every_epoch_has_as_many(
    attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline_lm.packing._ATTEMPTS", attempts)
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    number = count_packs(lengths, 128)
    packed = pack_dataset(Dataset.from_dict({"input_ids": [[0] * int(n) for n in lengths]}), 128, "bfd")
    assert len(packed) <= number <= 1.03 * len(packed)
    plans = [plan_packs(lengths, 128, key, number) for key in range(20)]
    for plan in plans:
        assert plan.num_packs == number
        assert np.array_equal(np.sort(plan.documents), np.arange(500))
        assert np.add.reduceat(lengths[plan.documents], plan.starts[:-1]).max() <= 128
        assert (np.diff(plan.starts) > 0).all()
    assert not np.array_equal(plans[0].documents, plans[1].documents)
    assert np.array_equal(plans[3].documents, plan_packs(lengths, 128, 3, number).documents)


def test_packs_hold_whole_documents_and_begin_positions_again(tmp_path: Path) -> None:
    tokenizer = train_tokenizer()
    records = [{"text": " ".join(["hat"] * count)} for count in (3, 9, 1, 5, 2, 8)]
    documents = read_documents([write_lines(tmp_path / "a.jsonl", records)], tokenizer, 32)
    packed = PackedDocuments(documents, 32, key=1)
    seen = []
    for number in range(len(packed)):
        pack = packed[number]
        assert {tuple(pack[name].shape) for name in ("input_ids", "labels", "position_ids")} == {(32,)}
        starts = [*(pack["position_ids"] == 0).nonzero().flatten().tolist(), 32]
        for which, start, stop in zip(packed.numbers(number), starts, starts[1:], strict=False):
            assert torch.equal(pack["input_ids"][start:stop], documents[which]["input_ids"])
            assert torch.equal(pack["labels"][start:stop], documents[which]["labels"])
            seen.append(which)
    assert sorted(seen) == list(range(len(records)))
    first = [packed.numbers(n) for n in range(len(packed))]
    packed.set_epoch(1)
    assert [packed.numbers(n) for n in range(len(packed))] != first
    train, val = packed.split_train_val(0.34, 0)
    parts = [{i for n in range(len(part)) for i in part.numbers(n)} for part in (train, val)]
    train.set_epoch(5)
    assert {i for n in range(len(train)) for i in train.numbers(n)} == parts[0]
    assert (parts[0] | parts[1], parts[0] & parts[1], len(parts[1])) == (set(range(6)), set(), 2)


def test_documents_one_after_another_are_cut_into_samples(tmp_path: Path) -> None:
    tokenizer = train_tokenizer()
    records = [{"text": " ".join(["hat"] * count)} for count in (3, 9, 1, 40, 2, 8)]
    documents = read_documents([write_lines(tmp_path / "a.jsonl", records)], tokenizer, sys.maxsize)
    assert (len(documents), documents.counts["divided"]) == (6, 0)
    joined = ConcatenatedDocuments(documents, 16)
    samples = [joined[n] for n in range(len(joined))]
    for name in ("input_ids", "labels"):
        assert {sample[name].shape for sample in samples} == {(16,)}
        words = torch.cat([sample[name][: sample["num_tokens"]] for sample in samples])
        assert torch.equal(words, torch.cat([document[name] for document in documents]))
    assert [int(sample["num_tokens"]) for sample in samples] == [16] * (len(samples) - 1) + [joined.tokens % 16]
    assert samples[-1]["labels"][joined.tokens % 16 :].eq(-100).all()
    assert sum(joined.count_beginning(n) for n in range(len(joined))) == 6


def test_a_file_of_tokens_is_read_in_place(tmp_path: Path) -> None:
    np.arange(3, 28, dtype="<u2").tofile(tmp_path / "a.bin")
    tokens = TokenFile([tmp_path / "a.bin"], 320, 8)
    assert [sample["input_ids"].tolist() for sample in copy.copy(tokens)] == [
        list(range(start, start + 8)) for start in (3, 11, 19)
    ]
    np.arange(3, 28, dtype="<u4").tofile(tmp_path / "b.bin")
    assert TokenFile([tmp_path / "b.bin"], 2**17, 8)[2]["labels"].tolist() == list(range(19, 27))
    with pytest.raises(paceline.TaskError, match=r"has token 26, and the model's vocabulary 26 tokens"):
        TokenFile([tmp_path / "a.bin"], 26, 8)[2]
    with pytest.raises(paceline.TaskError, match=r"a token is 4 bytes"):
        TokenFile([tmp_path / "a.bin"], 2**17, 8)
    with pytest.raises(paceline.TaskError, match=r"--data bin:.*No such file"):
        TokenFile([tmp_path / "c.bin"], 320, 8)
    both = TokenFile([tmp_path / "a.bin", tmp_path / "b.bin"], 320, 8)
    assert (len(both), both[3]["input_ids"].tolist()) == (3 + 6, list(np.fromfile(tmp_path / "b.bin", "<u2", 8)))


def test_a_long_text_is_divided_and_every_token_but_the_first_is_a_label_once(tmp_path: Path) -> None:
    tokenizer = train_tokenizer()
    text = " ".join(TEXTS)
    [whole], pieces = Encoder(tokenizer, 999)({"text": text}), Encoder(tokenizer, 7)({"text": text})
    assert len(pieces) > 3
    assert all(len(piece.tokens) <= 7 and not piece.labelled[0] for piece in pieces)
    labels = [word for piece in pieces for word, mark in zip(piece.tokens, piece.labelled, strict=True) if mark]
    assert labels == whole.tokens[1:]
    documents = read_documents(
        [write_lines(tmp_path / "a.jsonl", [{"text": text}, *map(chat, [text], TEXTS)])], tokenizer, 7
    )
    assert {name: documents.counts[name] for name in ("divided", "unlabelled", "endless")} == {
        "divided": 1,
        "unlabelled": 1,
        "endless": 0,
    }


def test_parquet_has_the_documents_of_jsonl(tmp_path: Path) -> None:
    records = [chat("Who?", "She."), chat("What?", "The cup.", "And?", "He.")]
    Dataset.from_list(records).to_parquet(tmp_path / "a.parquet")
    tokenizer = train_tokenizer()
    lines = read_documents([write_lines(tmp_path / "a.jsonl", records)], tokenizer, 64)
    assert read_documents([tmp_path / "a.parquet"], tokenizer, 64).digest == lines.digest
    (tmp_path / "b.parquet").write_text("no")
    with pytest.raises(paceline.TaskError, match="cannot be read as Parquet"):
        read_documents([tmp_path / "b.parquet"], tokenizer, 64)


def test_a_mixture_has_its_shares_and_every_pass_each_sample_once(tmp_path: Path) -> None:
    for name, first, count in (("a", 0, 60), ("b", 100, 30), ("c", 200, 11)):
        np.repeat(np.arange(first, first + count, dtype="<u2"), 4).tofile(tmp_path / f"{name}.bin")
    files = [TokenFile([tmp_path / f"{name}.bin"], 320, 4) for name in "abc"]
    mixture = Mixture(files, [0.2, 0.3, 0.5], key=1)
    seen: list[list[int]] = []
    for epoch in range(4):
        mixture.set_epoch(epoch)
        seen.append([int(mixture[n]["input_ids"][0]) for n in range(len(mixture))])
        sources = np.bincount([word // 100 for word in seen[-1]])
        assert sources.tolist() == [20, 30, 50]
        thirds = np.bincount([word // 100 for word in seen[-1][:50]])  # of an epoch that is not shuffled further
        assert thirds[2] in range(15, 36)
    times = np.bincount(np.concatenate(seen))
    assert set(times[:60]) == {1, 2}  # 80 of 60
    assert set(times[100:130]) == {4}
    assert set(times[200:211]) == {18, 19}
    again = copy.deepcopy(mixture)  # as in another process, or after a restart
    again.set_epoch(2)
    assert [int(again[n]["input_ids"][0]) for n in (5, 3)] == [seen[2][5], seen[2][3]]
    train, val = mixture.split_train_val(0.2, 0)
    parts = []
    for part in (train, val):
        words = set[int]()
        for epoch in range(9):
            part.set_epoch(epoch)
            words |= {int(part[n]["input_ids"][0]) for n in range(len(part))}
        parts.append(words)
    assert (len(parts[0] | parts[1]), parts[0] & parts[1]) == (101, set())


def test_a_mixture_of_packs_is_weighted_by_tokens(tmp_path: Path) -> None:
    tokenizer = train_tokenizer()
    sources = []
    for name, count in (("a", 3), ("b", 9)):
        records = [{"text": " ".join(["hat"] * (1 + n % count))} for n in range(20)]
        documents = read_documents([write_lines(tmp_path / f"{name}.jsonl", records)], tokenizer, 16)
        sources.append(PackedDocuments(documents, 16, key=count))
    mixture = Mixture(sources, [3, 1], key=1)
    tokens = [share.count * share.mean_tokens for share in mixture.shares]
    assert tokens[0] / sum(tokens) == pytest.approx(0.75, abs=0.06)
    seen: dict[tuple[int, int], list[int]] = {}
    for epoch in range(3):
        mixture.set_epoch(epoch)
        for number in range(len(mixture)):
            which, turn, row = mixture.locate(number)
            assert torch.equal(mixture[number]["input_ids"], sources[which].read(row, turn)["input_ids"])
            seen.setdefault((which, turn), []).extend(sources[which].numbers(row, turn))
    whole = [each for each in seen.values() if len(each) == 20]
    assert len(whole) >= 3
    assert all(sorted(each) == list(range(20)) for each in whole)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("bin:a.bin=0.7,bin:b.bin", r"'bin:b.bin' has no weight above 0. Write each source"),
        ("bin:a.bin=0.7,bin:b.bin=-1", r"'bin:b.bin=-1' has no weight above 0"),
        ("a.jsonl=1,b.jsonl=nan", r"'b.jsonl=nan' has no weight"),
        ("bin:a.bin=1,b.jsonl=1", r"mixes files of tokens \(bin:\), documents or streams"),
        ("stream:a.jsonl=1,b.jsonl=1", r"mixes files of tokens \(bin:\), documents or streams"),
        ("a.jsonl=1,a.jsonl=2", r"names a source twice"),
    ],
)
def test_a_wrong_mixture_is_refused(value: str, message: str) -> None:
    with pytest.raises(paceline.TaskError, match=message):
        parse_sources(value, "--data")


def test_patterns_and_addresses_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("web-1.bin", "web-0.bin", "odd,name=1.bin"):
        (tmp_path / name).write_text(name)
    address = f"bin:file://{tmp_path}/web-*.bin"
    for value in ("bin:web-*.bin", address):
        [source] = parse_sources(value, "--data")
        assert [file.read_text() for file in source.files("--data")] == ["web-0.bin", "web-1.bin"]
        assert parse_sources(str(source), "--data") == (source,)  # as it is recorded
    mixed = parse_sources(f"{address}=0.25,bin:web-1.bin=3", "--data")
    assert [source.weight for source in mixed] == [0.25, 3]
    [odd] = parse_sources("bin:odd,name=1.bin", "--data")
    assert odd.files("--data") == [tmp_path / "odd,name=1.bin"]
    for missing in ("bin:none-*.bin", f"bin:file://{tmp_path}/none.bin"):
        with pytest.raises(paceline.TaskError, match=r"--data bin:.*(no file matches|no such object)"):
            parse_sources(missing, "--data")[0].files("--data")


CHATS = '{"messages": [{"role": "user", "content": "Hi"}%s]}'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty. Each line is a document"),
        (b"\xef\xbb\xbf\n", "is empty"),
        (b'\xef\xbb\xbf{"text": "He sees."}\r\n', 1),
        ('{"text": "He\u2028sees\u0085."}'.encode(), 1),
        (b'{"text": "He sees."}\n' * 2, 2),
        (b'{"text": "He sees."}\nHe sees.\n', "line 2: this is not JSON"),
        (b"\x28\xb5\x2f\xfd\x00", "line 1: the file is compressed: unzstd it first"),
        (b'{"text": "He sees.\\ud800"}', "line 1: the text has half of a surrogate pair"),
        (b'{"conversations": []}', r"line 1: .* Write a chat as messages: jq"),
        (b'{"instruction": "a", "output": "b"}', r"line 1: .* Write prompts: jq"),
        (b'{"prompt": "a", "chosen": "b"}', r"line 1: .* Preferences are for TRL"),
        ((CHATS % "").encode(), "none of its 1 documents has a token to learn. A chat needs an answer"),
        ((CHATS % ', {"role": "assistant", "content": null}').encode(), 'line 1: an answer has no "content"'),
        ((CHATS % ', {"from": "gpt", "value": "a"}').encode(), r'line 1: a message must be an object with "role"'),
        ((CHATS % ', {"role": "tool", "content": "3"}, {"role": "assistant", "content": "b"}').encode(), 1),
    ],
)
def test_odd_files_are_read_or_refused_by_line(tmp_path: Path, content: bytes, expected: int | str) -> None:
    (tmp_path / "odd.jsonl").write_bytes(content)
    if isinstance(expected, int):
        assert len(read_documents([tmp_path / "odd.jsonl"], train_tokenizer(), 64)) == expected
    else:
        with pytest.raises(paceline.TaskError, match=rf"odd.jsonl.*{expected}"):
            read_documents([tmp_path / "odd.jsonl"], train_tokenizer(), 64)
