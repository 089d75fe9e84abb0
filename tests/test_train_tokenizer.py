"""train.tokenizer, .chat, .sources and .tokens: borders, answers, what a template may do, and what is refused."""

import json
import resource
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from train import chat, sources, tokens
from train import tokenizer as tokenizer_module
from train.chat import ChatTemplate
from train.data import Rows
from train.flags import InputError
from train.loss import IGNORED
from train.sources import Conversation, Document
from train.tokenizer import FileTokenizer
from train.tokens import load

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo é"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "ok"},
]


@pytest.fixture(scope="session")
def trained() -> str:
    """A byte-level tokenizer.json of less than 280 tokens that cuts texts after 3 tokens, as some files ask for."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["hello world, hello words\n" * 9], trainer)
    tokenizer.enable_truncation(3)
    return tokenizer.to_str()


@pytest.fixture
def make(trained, tmp_path):
    """Writes a tokenizer's folder with these settings and reads it."""

    def make(*, post_processor=None, **config) -> FileTokenizer:
        tokenizer = tokenizers.Tokenizer.from_str(trained)
        if post_processor is not None:
            tokenizer.post_processor = post_processor
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(tokenizer.to_str())
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return FileTokenizer(folder)

    return make


def ids_of(tokenizer: FileTokenizer, *contents) -> list[int]:
    parts = tokenizer.encode([Document(content, "here", 1) for content in contents])
    return np.concatenate([part.values for part in parts]).tolist()


def text_of(trained: str, ids: list[int]) -> str:
    return tokenizers.Tokenizer.from_str(trained).decode(ids, skip_special_tokens=False)


ADDS_BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
ADDS_BOTH = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])


@pytest.mark.parametrize(
    "post_processor, config, text",
    [
        (None, {"eos_token": "</s>"}, "{}</s>"),
        (ADDS_BOS, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, "<s>{}</s>"),
        (ADDS_BOTH, {"eos_token": "</s>"}, "<s>{}</s>"),
        (ADDS_BOTH, {}, "<s>{}</s>"),
        (ADDS_BOS, {}, "<s>{}"),
        (None, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}, "<s>{}</s>"),
        (ADDS_BOS, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}, "{}</s>"),
    ],
)
def test_every_text_has_its_special_tokens_once_and_is_never_cut(make, trained, post_processor, config, text):
    ids = ids_of(make(post_processor=post_processor, **config), "hello words é", b"world")
    assert text_of(trained, ids) == text.format("hello words é") + text.format("world")


def test_a_long_text_encoded_in_parts_has_the_tokens_of_the_whole(make, monkeypatch):
    text = "hello\n\nworld \nwords, hello\n" * 20
    whole = ids_of(make(eos_token="</s>"), text)
    monkeypatch.setattr(tokenizer_module, "_PIECE", 40)
    monkeypatch.setattr(tokenizer_module, "_AT_ONCE", 100)
    parts = list(make(eos_token="</s>").encode([Document(text, "here", 540)]))
    assert len(parts) > 10
    assert np.concatenate([part.values for part in parts]).tolist() == whole
    assert [part.is_start for part in parts] == [True] + [False] * (len(parts) - 1)
    assert sum(part.size for part in parts) == pytest.approx(540)


def test_bytes_of_tokens_add_up_to_those_of_the_text(make):
    tokenizer = make(eos_token="</s>")
    text = "hello é\n世界"
    assert tokenizer.num_bytes[ids_of(tokenizer, text)].sum() == len(text.encode())
    assert tokenizer.vocab_size == len(tokenizer.num_bytes)


@pytest.mark.parametrize(
    "template, ends",
    [(CHATML, ["yo é<|im_end|>\n", "ok<|im_end|>\n"]), (MARKED, ["yo é</s>", "ok</s>"])],
    ids=["by prefixes", "by marks"],
)
def test_answers_alone_are_learned_each_with_its_end(make, trained, template, ends):
    tokenizer = make(eos_token="</s>", chat_template=template)
    ids = np.array(ids_of(tokenizer, Conversation(CHAT)))
    assert text_of(trained, [token for token in ids if token >= 0]) == "".join(ends)
    whole, _ = ChatTemplate(template, {}).render(Conversation(CHAT))
    assert text_of(trained, np.where(ids < 0, ~ids, ids)) == whole


def test_labels_of_an_instruction_are_its_completion(make, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "hi", "completion": "hello", "id": 3}\n')
    tokens = load(tmp_path / "a.jsonl", 280, tokenizer=make(eos_token="</s>", chat_template=CHATML))
    row = Rows(tokens.values, 64)[0]
    answer = ids_of(make(eos_token="</s>"), "hello<|im_end|>\n")[:-1]
    assert row["labels"][row["labels"] != IGNORED].tolist() == answer
    start = int((row["labels"] != IGNORED).argmax())
    assert row["tokens"][start + 1 : start + 1 + len(answer)].tolist() == answer


def test_a_template_in_a_file_of_its_own_comes_first_and_sees_the_special_tokens(make, tmp_path, trained):
    make(eos_token="</s>", chat_template=CHATML)
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    ids = ids_of(FileTokenizer(tmp_path / "tokenizer"), Conversation(CHAT[:2]))
    assert text_of(trained, [token for token in ids if token >= 0]) == "yo é</s>"


def test_tools_and_json_reach_the_template_as_they_are():
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    text, _ = ChatTemplate(template, {}).render(Conversation(CHAT[:2], tools=[{"name": "<é>"}]))
    assert text == '[{"name": "<é>"}]hiyo é'


REFUSED = {
    "unclosed": ("{% if %}", "a chat template that Jinja can read"),
    "no generation prompt": (CHATML.partition("{% if")[0], "{% generation %} around the answers"),
    "rewrites the past": (
        "{% for m in messages %}{{ m.content }}{% if loop.last %}.{% endif %}{% endfor %}",
        "{% generation %} around the answers",
    ),
    "marks nothing": ("{% if false %}{% generation %}{% endgeneration %}{% endif %}", "that marks the answers"),
    "escape": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    "escape through a global": ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
    "change": ("{{ messages.append(1) }}", "SecurityError"),
    "endless": ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "100,000 turns"),
    "endless macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "100,000 turns",
    ),
    "doubles a text": (
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "more than 67,108,864 characters",
    ),
    "multiplies a text": ("{{ 'a' * 10**12 }}", "more than 67,108,864 characters"),
    "a huge power": ("{{ 9 ** 9 ** 9 }}", "more than 67,108,864 characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "complains": ("{{ raise_exception('no system\nrole') }}", "TemplateError: no system"),
    "date": ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_be_used_is_refused_in_one_line_with_the_document(make, name):
    template, message = REFUSED[name]
    with pytest.raises(InputError) as refusal:
        ids_of(make(eos_token="</s>", chat_template=template), Conversation(CHAT))
    assert str(refusal.value).startswith("here: with --tokenizer ")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_template_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(chat, "_SECONDS", 0.0)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        ChatTemplate(CHATML, {}).render(Conversation(CHAT))


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"messages": []}', "line 1 is a JSON object with"),
        ('{"messages": [{"content": "a"}]}', "line 1 is a JSON object with"),
        ('{"prompt": "a"}', "line 1 is a JSON object with"),
        ('{"prompt": ["a"], "completion": "b"}', "line 1 is a JSON object with"),
        ('{"text": "a", "messages": [{"role": "user"}]}', "line 1 has one form of content, found messages, text"),
        ('{"messages": [{"role": "user", "content": "a"}]}', 'at least one message with the role "assistant"'),
        ('{"text": "\\ud800"}', "line 1: text in UTF-8"),
    ],
)
def test_a_line_that_is_no_document_is_refused_with_its_number(make, tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(InputError, match=message):
        load(tmp_path / "a.jsonl", 280, tokenizer=make(eos_token="</s>", chat_template=CHATML))


def test_bad_lines_are_skipped_and_told_up_to_a_limit(make, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "_LONGEST_LINE", 5000)
    bad = [
        '{"text": "cut',
        "[" * 4000,
        "\0",
        '{"text": "\\ud800"}',
        f'{{"text": "{"a" * 20_000}"}}',
        '{"a": 1}',
        "1" * 4990,
    ]
    good = ['{"text": "one"}', "", '{"text": "two\\u0000"}']
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join([good[0], *bad, *good[1:]]).encode() + b'\n{"text": "\xff"}')
    tokenizer = make(eos_token="</s>")
    clean = tmp_path / "b.jsonl"
    clean.write_text("\n".join(good))
    expected = load(clean, 280, tokenizer=tokenizer).values.tolist()
    assert load(path, 280, tokenizer=tokenizer, max_bad_lines=8).values.tolist() == expected
    said = capsys.readouterr().err
    assert (
        said
        == f"warning   8 lines of {path} are skipped, of which the first: {path}: line 2 is a JSON object with "
        + (said.partition(" object with ")[2])
    )
    with pytest.raises(
        InputError, match=r"line 11 is a JSON object with .*; --max-bad-lines, which is 7, skips so many"
    ):
        load(path, 280, tokenizer=tokenizer, max_bad_lines=7)


def test_conversations_need_a_tokenizer_with_a_template(make, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT, "prompt": "hi"}))
    with pytest.raises(InputError, match=r"line 1: a conversation needs a chat template, --tokenizer FOLDER"):
        load(tmp_path / "a.jsonl", 280)
    with pytest.raises(InputError, match=r"line 1: with --tokenizer .* a chat template, in tokenizer_config\.json"):
        load(tmp_path / "a.jsonl", 280, tokenizer=make(eos_token="</s>"))


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "a tokenizer.json, or a folder that holds one"),
        ({"tokenizer.json": "{}"}, "a tokenizer.json of the tokenizers library"),
        ({"tokenizer.json": None}, "an eos_token in tokenizer_config.json"),
        ({"tokenizer.json": None, "tokenizer_config.json": "["}, r"tokenizer_config\.json .* readable"),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"eos_token": "<end>"}'}, "holds the eos_token <end>"),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"chat_template": 3}'}, "chat_template is no text"),
    ],
)
def test_an_unusable_tokenizer_is_refused_in_one_line(trained, tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(trained if content is None else content)
    with pytest.raises(InputError, match=message) as refusal:
        FileTokenizer(tmp_path)
    assert str(refusal.value).startswith("--tokenizer ")
    assert "\n" not in str(refusal.value)


def test_tokens_are_made_once_and_again_only_for_other_files(make, tmp_path, monkeypatch):
    text, cache, tokenizer = tmp_path / "a.txt", tmp_path / "run" / "tokens", make(eos_token="</s>")
    text.write_text("hello world")
    first = load(text, 280, tokenizer=tokenizer, cache=cache)
    assert isinstance(first.values, np.memmap)
    assert first.values.tolist() == ids_of(tokenizer, "hello world")
    with monkeypatch.context() as patch:
        patch.setattr(FileTokenizer, "encode", None)
        again = load(text, 280, tokenizer=tokenizer, cache=cache)
        assert again.checksum == first.checksum and again.starts.tolist() == first.starts.tolist() == [0]
    text.write_text("hello words")
    assert load(text, 280, tokenizer=tokenizer, cache=cache).checksum != first.checksum
    assert {path.name.partition(".")[2] for path in cache.iterdir()} == {"int32", "starts.npy"}


def test_a_failure_leaves_no_part_of_the_tokens(make, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{}\n')
    with pytest.raises(InputError, match="line 2 is a JSON object"):
        load(tmp_path / "a.jsonl", 280, tokenizer=make(eos_token="</s>"), cache=tmp_path / "tokens")
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_disk_that_is_full_once_the_tokens_are_written_is_told_in_one_line(make, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    tokenizer, limits = make(eos_token="</s>"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))  # room for the tokens, not for where documents begin
    try:
        with pytest.raises(InputError, match=r"tokens are kept in .*/tokens: a folder that can be written \(.+\)"):
            load(tmp_path / "a.txt", 280, tokenizer=tokenizer, cache=tmp_path / "tokens")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.suffix for path in (tmp_path / "tokens").iterdir()] == [".int32"]


def test_a_long_tokenization_says_how_far_it_is(make, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_bytes(b"hello\n" * 100_000)
    monkeypatch.setattr(tokens, "_SECONDS_BETWEEN_NOTES", 0)
    load(tmp_path / "a.txt", 280, tokenizer=make(eos_token="</s>"), cache=tmp_path / "tokens")
    assert f"tokenizing {tmp_path / 'a.txt'}: 1 of 1 MiB" in capsys.readouterr().err


def test_rows_of_parquet_are_documents(make, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    tokenizer = make(eos_token="</s>", chat_template=CHATML)
    folder = tmp_path / "data"
    folder.mkdir()
    messages = [{**message, "name": None} for message in CHAT]
    parquet.write_table(pyarrow.table({"messages": [messages], "id": [1]}), folder / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["hello", "world"]}), folder / "b.parquet")
    values = load(folder, 280, tokenizer=tokenizer).values.tolist()
    assert values == ids_of(tokenizer, Conversation(CHAT), "hello", "world")
    (folder / "c.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"c\.parquet: a readable \.parquet"):
        load(folder / "c.parquet", 280)


def test_parquet_without_pyarrow_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"needs pyarrow, pip install 'distflash_jax\[parquet\]'"):
        load(tmp_path / "a.parquet", 280)


@pytest.mark.parametrize(
    "post_processor, config, before, end",
    [
        (None, {"eos_token": "</s>"}, [], {1}),
        (ADDS_BOTH, {"eos_token": "<|im_end|>"}, [0], {3}),
        (ADDS_BOS, {}, [0], {0}),
    ],
)
def test_a_prompt_is_the_beginning_of_a_text_and_its_stream_is_whole_characters(
    make, post_processor, config, before, end
):
    tokenizer = make(post_processor=post_processor, **config)
    prompt = tokenizer.prompt("hello é").tolist()
    assert prompt[: len(before)] == before and tokenizer.end == end
    assert [*prompt, *end] == ids_of(tokenizer, "hello é") or config == {}
    stream = tokenizer.stream()
    pieces = [stream(token) for token in [*prompt, *end]]
    assert "".join(pieces) == "hello é" and not any("\ufffd" in piece for piece in pieces)
