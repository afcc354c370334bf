"""Merges an adapter's fine-tune into its base and saves the result as a Hugging Face folder: the weights that all peers convert.

    python benchmarks/peers/weights.py smollm2-135m smollm2-135m-sql OUT

Runs in specstream's own environment (the export extra).
"""

from __future__ import annotations

from pathlib import Path

import click

from specstream.toolchain.cli import run


@click.command()
@click.argument("model")
@click.argument("adapter")
@click.argument("out", type=click.Path(path_type=Path))
def weights(model: str, adapter: str, out: Path) -> None:
    """Save MODEL with the fine-tune of ADAPTER merged to the folder OUT, in fp32."""
    from specstream.models.adapter import check_base, load_adapter, merge_main
    from specstream.models.base import identity, load_base, load_config, resolve_base
    from specstream.toolchain.zoo import resolve_adapter

    source, folder = resolve_base(model), resolve_adapter(adapter)
    architectures = load_config(source).architectures
    assert architectures
    base, tokenizer = load_base(source)
    loaded = load_adapter(folder)
    check_base(loaded, identity(base, architectures[0]), folder)
    merged = merge_main(base, loaded)
    base.config.eos_token_id = tokenizer.stop_ids
    base.generation_config = type(base.generation_config)(eos_token_id=tokenizer.stop_ids, bos_token_id=base.config.bos_token_id)
    base.save_pretrained(out)
    tokenizer.tokenizer.save_pretrained(out)
    click.echo(f"{out}: {model} with {merged} matrices of {adapter} merged")


if __name__ == "__main__":
    import sys

    sys.exit(run(sys.argv[1:], weights, "weights.py"))
