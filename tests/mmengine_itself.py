"""Imports MMEngine, quietly, and without transformers.

It warns. It would import transformers for the sake of one optimizer, which no test builds, and that
takes most of the time.
"""

import sys
import warnings

import pytest

with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
    warnings.simplefilter("ignore")
    patch.setitem(sys.modules, "transformers", None)
    import mmengine.runner  # noqa: F401
