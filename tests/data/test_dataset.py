import pickle
from collections.abc import Iterator
from pickle import PicklingError

import pytest
from torch.utils.data import DataLoader, IterableDataset

from hooktrain.data import MapDataset


def drop_odd(x: int) -> int | None:
    return None if x % 2 else x


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_a_filtered_sample_is_replaced_by_the_same_other_one_each_time() -> None:
    dataset = MapDataset(list(range(10)), drop_odd)
    samples = [dataset[i] for i in range(10)]
    assert samples[::2] == [0, 2, 4, 6, 8]
    assert all(sample % 2 == 0 for sample in samples)
    assert [dataset[i] for i in range(10)] == samples


def test_a_function_that_filters_everything_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="first for 0"):
        MapDataset([1, 3], drop_odd)[0]


def test_a_stream_is_mapped_lazily() -> None:
    dataset = MapDataset(Stream(), drop_odd)
    assert isinstance(dataset, IterableDataset)
    assert list(dataset) == [0, 2, 4]
    assert list(pickle.loads(pickle.dumps(dataset))) == [0, 2, 4]


@pytest.mark.filterwarnings("ignore:.*not picklable")  # some releases of torch warn
def test_a_function_that_a_spawned_worker_could_not_import_is_refused() -> None:
    dataset = MapDataset([0, 1], lambda x: x)
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="spawn")  # type: ignore[arg-type]
    with pytest.raises((PicklingError, AttributeError), match="<lambda>"):
        iter(loader)
