from pathlib import Path

import numpy as np
import pytest
import torch

from hooktrain.data import CLASS_NAMES, DigitsDataset, RandomShift, load_digits


def test_there_are_1797_images_of_ten_digits() -> None:
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0.0, 1.0)
    counts = torch.bincount(labels).tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert len(CLASS_NAMES) == 10


def test_the_split_is_fixed_disjoint_and_complete() -> None:
    train, test = DigitsDataset(train=True), DigitsDataset(train=False)
    assert (len(train), len(test)) == (1437, 360)
    images, labels = load_digits()
    assert torch.equal(test[1]["image"], images[5])
    assert test[1]["label"] == labels[5]
    assert torch.equal(train[0]["image"], images[1])
    assert sorted(train.labels + test.labels) == sorted(labels.tolist())


def test_the_attribution_stands_beside_the_data() -> None:
    readme = Path(load_digits.__wrapped__.__defaults__[0]).parent / "README.md"
    assert "CC BY 4.0" in readme.read_text()
    assert "Alpaydin" in readme.read_text()


def test_a_random_shift_moves_the_image_and_fills_up_with_zeros() -> None:
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


def test_a_shift_of_zero_changes_nothing_and_a_negative_one_is_refused() -> None:
    sample = DigitsDataset(train=False)[0]
    assert torch.equal(RandomShift(0)(sample)["image"], sample["image"])
    with pytest.raises(ValueError, match="-1"):
        RandomShift(-1)


def test_a_transform_is_applied() -> None:
    dataset = DigitsDataset(train=False, transform=lambda s: {**s, "label": 99})
    assert dataset[0]["label"] == 99


def test_a_missing_or_damaged_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="install the package again"):
        load_digits(tmp_path / "digits.npz")
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"not a zip file")
    with pytest.raises(ValueError, match="is damaged"):
        load_digits(broken)
    other = tmp_path / "other.npz"
    np.savez(other, images=np.zeros((2, 8, 8), np.uint8), labels=np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="holds something else"):
        load_digits(other)
