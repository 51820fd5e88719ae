"""Data sets, models, evaluators and hooks of the shipped configurations."""

from hooktrain.demos.classification import (
    ClassificationEvaluator as ClassificationEvaluator,
)
from hooktrain.demos.coco import (
    AspectRatioSampler as AspectRatioSampler,
    CocoDataset as CocoDataset,
    CocoEvaluator as CocoEvaluator,
    build_coco_train_loader as build_coco_train_loader,
)
from hooktrain.demos.detection import (
    DetectionWriter as DetectionWriter,
    DigitDetector as DigitDetector,
    DigitScenes as DigitScenes,
    coco_annotations as coco_annotations,
    collate_detection as collate_detection,
    draw_boxes as draw_boxes,
)
from hooktrain.demos.digits import (
    CLASS_NAMES as CLASS_NAMES,
    DigitsCNN as DigitsCNN,
    DigitsDataset as DigitsDataset,
    RandomShift as RandomShift,
    load_digits as load_digits,
    trained_digits_cnn as trained_digits_cnn,
)
from hooktrain.demos.gan import (
    DigitsGAN as DigitsGAN,
    SampleQualityEvaluator as SampleQualityEvaluator,
    adam_for_each as adam_for_each,
    fixed_latents as fixed_latents,
)
from hooktrain.demos.imagenet import ImageClassifier as ImageClassifier
from hooktrain.demos.samples import (
    SampleWriter as SampleWriter,
    TextSampler as TextSampler,
)
from hooktrain.demos.text import (
    BitsPerCharacterEvaluator as BitsPerCharacterEvaluator,
    CharVocabulary as CharVocabulary,
    PythonDocs as PythonDocs,
    TextDataset as TextDataset,
    TextGPT as TextGPT,
    python_docs_vocabulary as python_docs_vocabulary,
)
