from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from specstream.models.errors import UserError
from specstream.runtimes.text import TextCodec

from .tiny_bundle import TEMPLATE, tokenizer


def byte_level() -> Tokenizer:
    return tokenizer()


def byte_fallback() -> Tokenizer:
    """As Llama 2's and Gemma's: pieces with a mark for the space, bytes for what has no piece, the text's first space stripped."""
    pieces = ["<unk>", "<|end|>", "<|user|>", "<|assistant|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁cat", "cat", "é", "▁ü", "日", "a", "b", "c", "\ufffd", "▁▁"]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|user|>", "<|assistant|>")])
    return made


CODECS = {
    make.__name__: TextCodec(made := make(), {made.token_to_id("<|end|>")}, TEMPLATE, {"bos_token": "<s>"})
    for make in (byte_level, byte_fallback)
}


@st.composite
def cut(draw: st.DrawFn, tokens: list[int]) -> list[list[int]]:
    """The tokens in blocks, as the loop emits them."""
    blocks = []
    while tokens:
        size = draw(st.integers(1, 6))
        blocks.append(tokens[:size])
        tokens = tokens[size:]
    return blocks


def streamed(codec: TextCodec, blocks: list[list[int]]) -> list[str]:
    stream = codec.stream()
    return [*(stream.push(block) for block in blocks), stream.finish()]


@pytest.mark.parametrize("name", CODECS)
@given(text=st.text(max_size=40), data=st.data())
def test_streamed_text_of_real_text(name: str, text: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    tokens = codec.tokenizer.encode(text, add_special_tokens=False).ids
    pieces = streamed(codec, data.draw(cut(tokens)))
    assert "".join(pieces) == codec.decode(tokens)
    # Characters are never split, so pieces have no replacement characters but those of the text itself.
    assert "".join(pieces).count("\ufffd") == codec.decode(tokens).count("\ufffd")
    if name == "byte_level":
        assert "".join(pieces) == text
        assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_streamed_text_of_any_tokens(name: str, data: st.DataObject) -> None:
    """A model may emit anything: halves of characters, special tokens in the middle, spaces first."""
    codec = CODECS[name]
    tokens = data.draw(st.lists(st.integers(0, codec.tokenizer.get_vocab_size() - 1), max_size=40))
    assert "".join(streamed(codec, data.draw(cut(tokens)))) == codec.decode(tokens)


@pytest.mark.parametrize("name", CODECS)
def test_a_character_is_held_until_its_last_byte(name: str) -> None:
    codec = CODECS[name]
    tokens = codec.tokenizer.encode("a𝄞b", add_special_tokens=False).ids
    assert len(tokens) >= 6
    pieces = [piece for piece in streamed(codec, [[token] for token in tokens]) if piece]
    assert "𝄞" in pieces or "𝄞b" in pieces
    assert "".join(pieces) == "a𝄞b"


def test_an_incomplete_end_is_flushed() -> None:
    codec = CODECS["byte_level"]
    tokens = codec.tokenizer.encode("x𝄞", add_special_tokens=False).ids[:-1]
    pieces = streamed(codec, [[token] for token in tokens])
    assert pieces[0] == "x"
    assert set(pieces[1:-1]) == {""}
    assert pieces[-1] == "\ufffd"


def test_leading_spaces_between_pieces_stay() -> None:
    codec = CODECS["byte_fallback"]
    ids = [codec.tokenizer.token_to_id(piece) for piece in ("▁the", "<|user|>", "▁cat", "cat", "▁the")]
    pieces = streamed(codec, [[i] for i in ids])
    assert pieces == ["the", "", " cat", "cat", " the", ""]


def test_stop_tokens_are_no_text() -> None:
    codec = TextCodec(tokenizer(), stop_ids={65, 66})
    assert codec.decode([65, 70, 66]) == codec.decode([70]) != ""
    assert streamed(codec, [[70], [65]]) == [codec.decode([70]), "", ""]


def test_a_prompt_goes_through_the_chat_template() -> None:
    codec = CODECS["byte_level"]
    expected = "<|user|>hi\n<|assistant|>"
    assert codec.encode("hi") == codec.tokenizer.encode(expected, add_special_tokens=False).ids
    assert codec.encode([{"role": "user", "content": "hi"}]) == codec.encode("hi")
    assert codec.encode("hi")[0] == codec.tokenizer.token_to_id("<|user|>")
    assert codec.encode("hi", raw=True) == codec.tokenizer.encode("hi").ids
    plain = TextCodec(tokenizer())
    assert plain.encode("hi") == plain.encode("hi", raw=True)


def test_templates_as_they_are_found() -> None:
    """White space control, tojson without HTML escapes, generation marks, loop controls, special tokens."""
    source = """{{ bos_token }}
    {% for m in messages %}
        {% if m.role == 'system' %}{% continue %}{% endif %}
{% generation %}[{{ m | tojson }}]{% endgeneration %}
    {% endfor %}
{{- eos_token -}}
{{ strftime_now('%%') }}{% if add_generation_prompt %}>{% endif %}"""
    codec = TextCodec(tokenizer(), chat_template=source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    assert codec.render([{"role": "system", "content": "x"}, {"role": "user", "content": "a < 'ü'"}]) == (
        '<s>\n[{"role": "user", "content": "a < \'ü\'"}]</s>%>'
    )


def test_templates_run_in_a_sandbox() -> None:
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(UserError, match="refused the messages"):
        TextCodec(tokenizer(), chat_template=escape).render([{"role": "user", "content": "x"}])
    change = "{{ messages.append(1) }}"
    with pytest.raises(UserError, match="refused the messages"):
        TextCodec(tokenizer(), chat_template=change).render([{"role": "user", "content": "x"}])


def test_what_a_template_refuses_is_said() -> None:
    codec = TextCodec(tokenizer(), chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        codec.encode("hi")
    with pytest.raises(UserError, match="not valid jinja"):
        TextCodec(tokenizer(), chat_template="{% if %}")


@pytest.mark.parametrize(("prompt", "message"), [("", "prompt is empty"), ([], "list of messages is empty"), ("\ud800", "not Unicode")])
def test_prompts_that_say_nothing(prompt: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        CODECS["byte_level"].encode(prompt)  # type: ignore[arg-type]


def test_messages_need_a_template() -> None:
    with pytest.raises(UserError, match="no chat template"):
        TextCodec(tokenizer()).encode([{"role": "user", "content": "x"}])


def test_text_without_any_token() -> None:
    made = tokenizer()
    made.normalizer = normalizers.Strip()
    with pytest.raises(UserError, match="empty for this tokenizer"):
        TextCodec(made).encode("  ", raw=True)
