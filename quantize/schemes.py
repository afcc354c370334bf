"""The schemes: which product of a bundle's graphs gets which format, from fp32 graphs in one folder to quantized ones in another.

    int4    4-bit blocks with zero points, the head's table among them
    int8    8-bit blocks
    w8a8    8-bit weights and 8-bit activations of one fixed scale, smoothed; where that errs too much, rows divided by their maxima
            first, or 8-bit blocks
    mixed   w8a8, its most harmful products raised to 8-bit blocks, then to fp32, until a measured limit holds

In all of them a row's activations are rounded by scales that are fixed or that row's own, so rows stay independent. Knows graphs
and weights; nothing of bundles' manifests, text or sessions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import onnx_ir as ir

from specstream.export.passes.pack_projections import pack_projections
from specstream.export.passes.packed_attention import fuse_packed_attention
from specstream.models.errors import UserError
from specstream.quantize.cache import round_cache
from specstream.quantize.calibrate import Sample
from specstream.quantize.fit import Fit, apply_factors, choose, find_factors, fit
from specstream.quantize.formats import BlockFormat, FloatArray, Format
from specstream.quantize.graph_file import WeightFile, weight_bytes
from specstream.quantize.products import Product, find_lookups, find_products
from specstream.quantize.rewrite import rewrite

SCHEMES: Final = ("int4", "int8", "w8a8", "mixed")
NEEDS_SAMPLES: Final = ("w8a8", "mixed")
TAKES_MOMENTS: Final = ("int4",)

# Without VNNI, x86 kernels add pairs of products of unsigned and signed bytes in 16 bits, where 255 · 127 · 2 does not fit. ONNX Runtime
# 1.32 has an entry for slower exact sums (session.x64quantprecision) but fails to load such graphs with it, so the need is written down.
REQUIRES: Final = "on x86, AVX-512 VNNI or AVX-VNNI: without them sums of 8-bit products saturate"

# A scale for 64 weights instead of 32 makes a call of one row of SmolLM2-135M in int4 a tenth faster; what it loses is less than
# compensation of errors gains.
USUAL_BLOCK_SIZES: Final = (64, 32, 16)

# Of the main graph's weights, what tables of rotary angles may take more: they make attention cheaper to call.
TABLES_SHARE: Final = 0.025

# Relative squared error of a product's result up to which w8a8 keeps a fixed scale.
ERROR_LIMIT = 2e-3
# The same for the head's fixed scale: its error goes into logits as it is. One near 2e-3 trebled the divergence from fp32
# (E2E: 0.006 to 0.017).
HEAD_ERROR_LIMIT = 1e-4

Plan = dict[str, Format]  # of one graph: weight -> format; what it does not name stays fp32


@dataclass(frozen=True)
class Options:
    """What a scheme can be told.

    Attributes:
        scheme: one of ``SCHEMES``.
        block_size: of products in blocks.
        accuracy_level: of products in blocks, see :class:`BlockFormat`.

    Raises:
        UserError: a scheme, block size or accuracy level that does not exist.
    """

    scheme: str
    block_size: int = 32
    accuracy_level: int = 4

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UserError(f"scheme {self.scheme!r} is unknown; one of {', '.join(SCHEMES)} expected")
        self.blocks(8)

    def blocks(self, bits: Literal[4, 8]) -> BlockFormat:
        return BlockFormat(bits, self.block_size, self.accuracy_level, symmetric=bits == 8)


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        products: how many matrices each kind of operator holds, ``fp32`` among them.
        weight_bytes: size of the weights' file.
        packed: projections that became parts of larger ones.
    """

    products: dict[str, int]
    weight_bytes: int
    packed: int


def check_graphs(folder: Path, graphs: Sequence[str], options: Options) -> None:
    """Look whether the options suit the graphs, without reading weights.

    Raises:
        UserError: a block size that does not divide a matrix; a graph that has no products in fp32.
    """
    for graph in graphs:
        products = find_products(ir.load(folder / graph))
        if not products:
            raise UserError(f"{folder / graph}: has no products with fp32 weights; is it quantized already?")
        for product in products:
            if product.shape[0] % options.block_size:
                raise UserError(
                    f"block size {options.block_size} does not divide the {product.shape[0]} inputs of {product.name}; choose a smaller one"
                )


def usual_block_size(folder: Path, graphs: Sequence[str]) -> int:
    """The largest of ``USUAL_BLOCK_SIZES`` that divides the inputs of all products; the smallest where none does."""
    sizes = {product.shape[0] for graph in graphs for product in find_products(ir.load(folder / graph))}
    fitting = (size for size in USUAL_BLOCK_SIZES if all(inputs % size == 0 for inputs in sizes))
    return next(fitting, USUAL_BLOCK_SIZES[-1])


@dataclass
class Quantizer:
    """Makes quantized graphs of a bundle's fp32 graphs, as often as a search needs them.

    Args:
        folder: of the fp32 graphs.
        graphs: file names, the main graph first.
        options: the scheme and its settings.
        context: positions that the model can have; 0: attention stays as it is.
        samples: what :func:`specstream.quantize.calibrate.collect` found, by graph; schemes with 8-bit activations need it.
        moments: what :func:`specstream.quantize.calibrate.collect_moments` found, by graph; 4-bit blocks are better with it.
        cache: what :func:`specstream.quantize.calibrate.collect_cache` found: the cache becomes 8-bit integers. Left out, it stays float32.

    Raises:
        UserError: as :func:`check_graphs`.
    """

    folder: Path
    graphs: Sequence[str]
    options: Options
    samples: Mapping[str, Mapping[str, Sample]] | None = None
    context: int = 0
    moments: Mapping[str, Mapping[str, FloatArray]] | None = None
    cache: FloatArray | None = None
    factors: dict[str, dict[str, FloatArray]] = field(default_factory=dict)
    fits: dict[str, dict[str, Fit]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_graphs(self.folder, self.graphs, self.options)
        if self.options.scheme in NEEDS_SAMPLES:
            if self.samples is None:
                raise ValueError(f"{self.options.scheme} needs samples of activations")
            for graph in self.graphs:
                self._fit(graph)

    def _fit(self, graph: str) -> None:
        """Smoothing and scales of one graph. Samples of smoothed values become those of the scaled ones."""
        assert self.samples is not None
        samples = dict(self.samples[graph])
        model = self._load(graph, smoothed=False)
        self.factors[graph] = find_factors(model, samples)
        apply_factors(model, self.factors[graph])
        fits = self.fits[graph] = {}
        # Products of the same rows round them once, by one scale.
        readers: dict[str, list[Product]] = {}
        for product in find_products(model):
            readers.setdefault(product.rows.name or "", []).append(product)
        for rows, products in readers.items():
            if (sample := samples.get(rows)) is not None:
                found = fit([product.matrix() for product in products], sample)
                for name in {product.name for product in products}:
                    fits[name] = fits[name].joined(found) if name in fits else found

    def _load(self, graph: str, smoothed: bool = True) -> ir.Model:
        model = ir.load(self.folder / graph)
        pack_projections(model)
        if smoothed:
            apply_factors(model, self.factors.get(graph, {}))
        return model

    def plans(self, raised: int = 0) -> dict[str, Plan]:
        """A format for each product and lookup of each graph.

        Args:
            raised: for ``mixed``: how many steps up from w8a8, see :meth:`steps`.
        """
        made: dict[str, Plan] = {}
        for graph in self.graphs:
            model = self._load(graph, smoothed=False)
            products = find_products(model)
            plan = {product.name: self._format(graph, product) for product in products}
            for where, name, kept in self.ladder()[:raised]:
                if where == graph:
                    plan[name] = self.options.blocks(8) if kept else None
            for lookup in find_lookups(model):
                # A table follows the head that shares it, in whichever graph that is; one without a head is only looked up.
                name = lookup.table.name or ""
                shared = plan.get(name) or made.get(self.graphs[0], {}).get(name)
                if name not in plan and lookup.shape[1] % self.options.block_size == 0:
                    plan[name] = shared or self._blocks()
            made[graph] = {name: form for name, form in plan.items() if form is not None}
        return made

    def _blocks(self) -> BlockFormat:
        return self.options.blocks(4 if self.options.scheme == "int4" else 8)

    def _format(self, graph: str, product: Product) -> Format | None:
        if self.options.scheme not in NEEDS_SAMPLES:
            return self._blocks()
        found = self.fits[graph].get(product.name)
        fixed = HEAD_ERROR_LIMIT if product.is_head and graph == self.graphs[0] else ERROR_LIMIT
        # A product that no text reached has no scale.
        return self.options.blocks(8) if found is None else choose(found, ERROR_LIMIT, fixed, self.options.blocks(8))

    def ladder(self) -> list[tuple[str, str, bool]]:
        """Steps of ``mixed``: a graph, a product of it, whether it keeps 8-bit blocks (else fp32). The worst product comes first; all
        are raised to blocks before any to fp32."""
        found = [
            (min(f.error_static, f.error_normalised), graph, name) for graph in self.graphs for name, f in self.fits.get(graph, {}).items()
        ]
        order = [(graph, name) for _, graph, name in sorted(found, reverse=True)]
        return [(graph, name, kept) for kept in (True, False) for graph, name in order]

    def write(self, out: Path, plans: Mapping[str, Plan] | None = None) -> Written:
        """Write all graphs into a folder, their weights into one file.

        Args:
            out: an existing folder.
            plans: as :meth:`plans` gives them, which is what is taken when left out.
        """
        plans = plans or self.plans()
        counts: Counter[str] = Counter()
        packed = tables = 0
        with WeightFile(out / f"{self.graphs[0]}.data") as weights:
            for graph in self.graphs:
                model = ir.load(self.folder / graph)
                packed += pack_projections(model)
                apply_factors(model, self.factors.get(graph, {}))
                counts.update(rewrite(model, plans[graph], (self.moments or {}).get(graph)))
                counts["fp32"] += len(find_products(model))
                tables = tables or int(TABLES_SHARE * weight_bytes(model))
                fuse_packed_attention(model, self.context, tables)
                if self.cache is not None:
                    round_cache(model, self.cache)
                weights.save(model, out / graph)
        return Written({kind: count for kind, count in counts.items() if count}, weights.nbytes, packed)

    def search(self, measure: Callable[[Mapping[str, Plan]], float], limit: float) -> dict[str, Plan] | None:
        """The plans with the fewest steps of the ladder whose measure is within the limit, by bisection; None when none is.

        Args:
            measure: writes and measures plans; less is better, and more steps should never make it worse.
        """
        steps = len(self.ladder())
        if measure(best := self.plans(0)) <= limit:
            return best
        if measure(best := self.plans(steps)) > limit:
            return None
        below, above = 0, steps
        while above - below > 1:
            middle = (below + above) // 2
            plans = self.plans(middle)
            if measure(plans) <= limit:
                above, best = middle, plans
            else:
                below = middle
        return best
