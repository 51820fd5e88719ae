"""MMEngine's base class of metrics."""

from abc import abstractmethod
from itertools import chain
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from hooktrain.evaluation import DatasetEvaluator
from hooktrain.utils import comm
from hooktrain.utils.comm import on_main_process


class BaseMetric(DatasetEvaluator):
    """An evaluator that computes metrics from ``results``, a list for all samples of all ranks.

    Args:
        collect_device: ``"cpu"`` or ``"gpu"``; results are always gathered on the CPU.
        prefix: the prefix of the names of the metrics; None is ``default_prefix``.
        collect_dir: not used.

    Attributes:
        results: the list to which :meth:`process` appends.
    """

    default_prefix: str | None = None

    def __init_subclass__(cls) -> None:
        evaluate = cls.evaluate
        if evaluate.__defaults__ is None:  # MMEngine always passes the size.
            evaluate.__defaults__ = (None,)

    def __init__(
        self,
        collect_device: str = "cpu",
        prefix: str | None = None,
        collect_dir: Any = None,
    ) -> None:
        self.results: list[Any] = []
        self.prefix = prefix or self.default_prefix
        self.collect_device = collect_device
        self._dataset_meta: Any = None

    @property
    def dataset_meta(self) -> Any:
        """Facts about the data set, such as its classes, set by the user."""
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, dataset_meta: Any) -> None:
        self._dataset_meta = dataset_meta

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self.results.clear()

    @abstractmethod
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Compute the metrics, by name, from all ranks' results; called on the main process."""

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        """Compute the metrics, on every rank. A collective.

        Args:
            size: the size of the data set. Further results are padding, and are dropped.
        """
        mine = tree_map_only(Tensor, lambda tensor: tensor.cpu(), self.results)
        of_ranks = comm.all_gather(mine)
        results = [*chain.from_iterable(of_ranks)][:size]
        metrics = on_main_process(lambda: self.compute_metrics(results))
        self.results.clear()
        if self.prefix:
            return {f"{self.prefix}/{name}": value for name, value in metrics.items()}
        return metrics
