"""Between text and token ids, on a device: `tokenizer.json`, the chat template, and text that streams out without broken characters.

Uses `tokenizers` and `jinja2`; knows nothing of models.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from specstream.models.errors import UserError
from specstream.runtimes.bundle import Bundle

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

Message = Mapping[str, Any]


class TextCodec:
    """A bundle's tokenizer.

    Args:
        tokenizer: from `tokenizer.json`.
        stop_ids: tokens that end a text; they are never part of it.
        chat_template: jinja source, as in Hugging Face's files; None for models without one.
        special_tokens: what templates read as ``bos_token``, ``eos_token`` and so on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self._special_tokens = dict(special_tokens or {})
        self._template = _compile(chat_template) if chat_template is not None else None
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = self.stop_ids | {token_id for token_id, token in added.items() if token.special}
        self._has_byte_tokens = tokenizer.token_to_id("<0x00>") is not None

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> TextCodec:
        """Read the tokenizer files of a bundle.

        Raises:
            UserError: one of them is missing or cannot be read.
        """
        path = bundle.path(TOKENIZER)
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise UserError(f"{path}: tokenizers cannot read it: {error}") from error
        config: dict[str, Any] = {}
        if bundle.has(TOKENIZER_CONFIG):
            path = bundle.path(TOKENIZER_CONFIG)
            try:
                config = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(f"{path}: not JSON ({error})") from None
        specials = {name: token for name, value in config.items() if name.endswith("_token") and (token := _token_text(value)) is not None}
        template = bundle.path(CHAT_TEMPLATE).read_text(encoding="utf-8") if bundle.manifest.tokenizer.has_chat_template else None
        return cls(tokenizer, bundle.manifest.tokenizer.stop_ids, template, specials)

    @property
    def has_template(self) -> bool:
        """Whether a user's text goes through a chat template."""
        return self._template is not None

    def encode(self, prompt: str | Sequence[Message], raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        A string becomes a user's message in the chat template, if the model has one and ``raw`` is not set; a list of messages
        (``{"role", "content"}``) always goes through it.

        Raises:
            UserError: nothing to say (empty prompt or list), a text that is no Unicode, or messages that the template refuses.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise UserError("the prompt is empty; give some text")
            if raw or self._template is None:
                return self._ids(prompt, add_special_tokens=True)
            prompt = [{"role": "user", "content": prompt}]
        if not prompt:
            raise UserError("the list of messages is empty; give at least one")
        return self._ids(self.render(prompt), add_special_tokens=False)

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the assistant's next answer begins.

        Raises:
            UserError: no chat template, or it refuses these messages.
        """
        if self._template is None:
            raise UserError("this model has no chat template; give the prompt as plain text")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"the chat template refused the messages: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special and stop tokens left out."""
        return self._text([t for t in token_ids if t not in self._skipped])

    def stream(self) -> TextStream:
        """A decoder for one text that arrives in pieces."""
        return TextStream(self)

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise UserError(f"the prompt is not Unicode text: {error}") from error
        if not ids:
            raise UserError("the prompt is empty for this tokenizer; give some text")
        return ids


class TextStream:
    """Turns tokens into text as they come: pieces are whole characters, and together they are ``decode`` of all tokens.

    A tokenizer's decoder looks at more than one token: the bytes of a character may be spread over several, and some decoders
    treat the first token of a text differently (a leading space). So a piece is the difference between the decoded text of a short
    window with and without the new tokens, and is held back while its end may still change. The window begins anew after some tokens,
    so that a piece's time does not grow with the text.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []  # from the start of the window: tokens of earlier pieces, then those held back
        self._emitted = 0  # tokens of the window whose text is out
        self._text = ""  # theirs

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens complete; empty while a character is incomplete."""
        self._ids += [t for t in token_ids if t not in self._codec._skipped]
        return self._piece(final=False)

    def finish(self) -> str:
        """What was held back, when no more tokens come: incomplete characters become U+FFFD."""
        return self._piece(final=True)

    def _piece(self, final: bool) -> str:
        if self._emitted == len(self._ids):
            return ""
        # Byte tokens (<0x..>) are decoded a run at a time and one bad byte spoils the run, so a run is held until it ends.
        if not final and self._codec._has_byte_tokens and _BYTE_TOKEN.fullmatch(self._codec.tokenizer.id_to_token(self._ids[-1]) or ""):
            return ""
        before, after = self._text, self._codec._text(self._ids)
        if not final and after.endswith("\ufffd"):
            return ""
        if len(after) > len(before):  # else these tokens have no text: keep a window that has some
            if len(self._ids) > _WINDOW:
                self._ids = self._ids[self._emitted :]
                self._text = self._codec._text(self._ids)
            else:
                self._text = after
            self._emitted = len(self._ids)
        return after[len(before) :]


_WINDOW = 16  # tokens, about
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's text for training; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    """A chat template, in the sandbox and with the helpers that Hugging Face's templates expect."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    # Not jinja2's own tojson, which escapes HTML characters.
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template is not valid jinja: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _token_text(value: Any) -> str | None:
    """A special token's text: `tokenizer_config.json` has it as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
