"""The options of commands that can sample: ``--temperature``, filters, penalties and ``--seed``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from specstream.models.errors import UserError

if TYPE_CHECKING:
    from specstream.runtimes import Sampling

# Gives the settings, None when greedy; with a new seed each time, unless the user named one.
NewSampling = Callable[[], "Sampling | None"]

F = TypeVar("F", bound=Callable[..., Any])

# Field of `Sampling` -> type, placeholder, help.
_OPTIONS: Final[dict[str, tuple[type, str, str]]] = {
    "temperature": (float, "T", "Sample at this temperature.  [default: 0, greedy]"),
    "top_k": (int, "K", "Sample from the K likeliest tokens."),
    "top_p": (float, "P", "Sample from the likeliest tokens that have the share P together."),
    "min_p": (float, "P", "Sample from tokens at least P times as likely as the likeliest."),
    "repetition_penalty": (float, "R", "Divide the logits of tokens in the prompt or the text by R."),
    "presence_penalty": (float, "X", "Subtract X from the logits of tokens in the text."),
    "frequency_penalty": (float, "X", "Subtract X for each time that a token is in the text."),
    "seed": (int, "N", "The same seed gives the same text.  [default: a new one, which is shown]"),
}
_NEED_NOISE: Final = ("top_k", "top_p", "min_p", "seed")


def sampling_options(function: F) -> F:
    """Add the options to a command, and give it as ``new_sampling`` what they ask for. They are checked before the command starts."""

    @functools.wraps(function)
    def command(*arguments: Any, **options: Any) -> Any:
        given = {name: value for name in _OPTIONS if (value := options.pop(name)) is not None}
        return function(*arguments, new_sampling=_checked(given), **options)

    for name, (kind, placeholder, text) in reversed(_OPTIONS.items()):
        command = click.option(_flag(name), type=kind, metavar=placeholder, help=text)(command)
    return command  # type: ignore[return-value]


def _checked(given: dict[str, Any]) -> NewSampling:
    """
    Raises:
        UserError: values outside their ranges, or options without effect.
    """
    if not given:
        return lambda: None
    from specstream.runtimes.sampling import Sampling, random_seed

    fixed = Sampling(**{"temperature": 0.0, **given})
    idle = [_flag(name) for name in _NEED_NOISE if name in given]
    if fixed.temperature == 0 and idle:
        raise UserError(f"{', '.join(idle)}: no effect without a --temperature above 0 (0 is greedy decoding); add one, or leave it out")
    if fixed.is_greedy:
        return lambda: None
    return lambda: fixed if "seed" in given or fixed.temperature == 0 else Sampling(**given, seed=random_seed())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
