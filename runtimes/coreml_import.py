"""Imports coremltools where it is wanted: quietly, and with one clear error where it is missing.

The import says what it found of other libraries (a torch it was not tested with, no Core ML on this system): nothing that a user can
act on. Knows nothing of models.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from typing import Any

from specstream.models.errors import UserError


def import_coremltools() -> Any:
    """The module coremltools. The first call takes seconds: it imports torch and scikit-learn where they are installed.

    Raises:
        UserError: coremltools is not installed.
    """
    if importlib.util.find_spec("coremltools") is None:
        raise UserError("this needs the coreml extra (coremltools is missing): pip install 'specstream-toolchain[coreml]'")
    # Its messages below errors stay off after the import too: conversions log renamed variables, not problems.
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("coremltools")
        if importlib.util.find_spec("torch") is not None:
            _fold_one_element_arrays()
    return module


def _fold_one_element_arrays() -> None:
    """Make coremltools 9.0's torch frontend work with NumPy 2.4.

    Its `int` and `bool` operators fold a constant of shape (1,) by `int(array)`, which NumPy 2.4 refuses ("only 0-dimensional arrays can
    be converted to Python scalars"); every size that is read from a traced tensor comes that way. Such constants are folded here; all
    else goes to the original.
    """
    from coremltools.converters.mil.frontend.torch import ops

    original = ops._cast
    if getattr(original, "folds_one_element_arrays", False):
        return

    def cast(context: Any, node: Any, dtype: type, dtype_name: str) -> None:
        (x,) = ops._get_inputs(context, node, expected=1)
        value: Any = x.val if x.can_be_folded_to_const() else None
        if getattr(value, "ndim", 0) > 0 and value.size == 1:
            context.add(ops.mb.const(val=dtype(value.item()), name=node.name), node.name)
        else:
            original(context, node, dtype, dtype_name)

    cast.folds_one_element_arrays = True  # type: ignore[attr-defined]
    ops._cast = cast
