"""Demonstrations: data sets, models, evaluators and hooks that nothing else depends on."""

from hooktrain.demos.digits import (
    CLASS_NAMES,
    DigitsCNN,
    DigitsDataset,
    RandomShift,
    load_digits,
    trained_digits_cnn,
)
from hooktrain.demos.gan import DigitsGAN, SampleQualityEvaluator, fixed_latents
from hooktrain.demos.samples import SampleWriter, TextSampler
from hooktrain.demos.text import (
    BitsPerCharacterEvaluator,
    CharVocabulary,
    PythonDocs,
    TextDataset,
    TextGPT,
    python_docs_vocabulary,
)

__all__ = [
    "CLASS_NAMES",
    "BitsPerCharacterEvaluator",
    "CharVocabulary",
    "DigitsCNN",
    "DigitsDataset",
    "DigitsGAN",
    "PythonDocs",
    "RandomShift",
    "SampleQualityEvaluator",
    "SampleWriter",
    "TextDataset",
    "TextGPT",
    "TextSampler",
    "fixed_latents",
    "load_digits",
    "python_docs_vocabulary",
    "trained_digits_cnn",
]
