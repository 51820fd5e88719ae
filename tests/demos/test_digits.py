import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooktrain.demos import (
    CLASS_NAMES,
    DigitsCNN,
    DigitsDataset,
    RandomShift,
    load_digits,
    trained_digits_cnn,
)


def test_there_are_1797_images_of_ten_digits() -> None:
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    counts = torch.bincount(labels).tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert len(CLASS_NAMES) == 10


def test_the_split_is_fixed() -> None:
    train, test = (
        DigitsDataset(train=True),
        DigitsDataset(train=False, transform=lambda s: {**s, "seen": 1}),
    )
    assert (len(train), len(test)) == (1437, 360)
    images, labels = load_digits()
    assert torch.equal(test[1]["image"], images[5])
    assert (test[1]["label"], test[1]["seen"]) == (labels[5], 1)
    assert torch.equal(train[0]["image"], images[1])
    assert sorted(train.labels + test.labels) == sorted(labels.tolist())


def test_a_random_shift_moves_the_image() -> None:
    image = torch.zeros(1, 8, 8)
    image[0, 3, 4] = 1.0
    sample = {"image": image, "label": 3}
    places = set()
    for _ in range(200):
        shifted = RandomShift(1)(sample)
        assert shifted["label"] == 3
        assert shifted["image"].shape == (1, 8, 8)
        places.add(tuple(shifted["image"].nonzero()[0].tolist()[1:]))
    assert places == {(y, x) for y in (2, 3, 4) for x in (3, 4, 5)}
    assert image[0, 3, 4] == 1.0


def batch(count: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "image": torch.rand(count, 1, 8, 8, generator=generator),
        "label": torch.randint(10, (count,), generator=generator),
    }


def test_training_gives_the_cross_entropy_of_the_logits() -> None:
    model, data = DigitsCNN(channels=4, dropout=0.0), batch()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    loss = model(data)
    logits = model.eval()(data)
    assert list(loss) == ["loss_cls"]
    assert logits.shape == (4, 10)
    assert torch.equal(loss["loss_cls"], F.cross_entropy(logits, data["label"]))


def test_it_recognises_digits_that_it_has_not_seen() -> None:
    test = DigitsDataset(train=False)
    classifier = trained_digits_cnn(DigitsDataset(train=True))
    logits = classifier({"image": test.images})
    correct = logits.argmax(1) == torch.tensor(test.labels)
    assert correct.float().mean() > 0.97
    assert not logits.requires_grad


def test_it_is_the_same_each_time() -> None:
    data = torch.utils.data.Subset(DigitsDataset(train=True), range(100))
    before = torch.get_rng_state()
    first = trained_digits_cnn(data, epochs=1, channels=4).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    with torch.no_grad():  # as inside of an evaluation
        again = trained_digits_cnn(data, epochs=1, channels=4).state_dict()
    other = trained_digits_cnn(data, epochs=1, channels=4, seed=1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
