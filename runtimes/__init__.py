"""Runs bundles on a device: NumPy, ONNX Runtime, tokenizers and jinja2, nothing else.

from specstream.runtimes import load

lm = load("bundle")
for piece in lm.stream("Name three rivers."):
    print(piece, end="", flush=True)
print(lm.last.tokens_per_call)
"""

from specstream.runtimes.bundle import Bundle
from specstream.runtimes.language_model import GenerationResult, LanguageModel, load
from specstream.runtimes.sampling import Sampling
from specstream.runtimes.threads import share_threads

__all__ = ["Bundle", "GenerationResult", "LanguageModel", "Sampling", "load", "share_threads"]
