import pytest
import torch

from hooktrain.data import DigitsDataset
from hooktrain.model import trained_digits_cnn


def test_it_recognises_digits_that_it_has_not_seen() -> None:
    test = DigitsDataset(train=False)
    classifier = trained_digits_cnn(DigitsDataset(train=True))
    logits = classifier({"image": test.images})
    correct = logits.argmax(1) == torch.tensor(test.labels)
    assert correct.float().mean() > 0.97
    assert not logits.requires_grad


def test_it_is_the_same_each_time_and_the_run_around_it_goes_on_undisturbed() -> None:
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


def test_less_than_one_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="epochs must be at least 1, but got 0"):
        trained_digits_cnn(DigitsDataset(train=True), epochs=0)
