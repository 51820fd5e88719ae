"""MMEngine's base of metrics."""

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
        collect_device: ``"cpu"`` or ``"gpu"``: results are always brought together on the CPU.
        prefix: is put before the names of the metrics; None is ``default_prefix``.
        collect_dir: not used.

    Attributes:
        results: what :meth:`process` has appended.
    """

    default_prefix: str | None = None

    def __init_subclass__(cls) -> None:
        evaluate = cls.evaluate
        if evaluate.__defaults__ is None:  # MMEngine always gives the size.
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
        """Facts about the data set, such as its classes. The user sets them."""
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, dataset_meta: Any) -> None:
        self._dataset_meta = dataset_meta

    def reset(self) -> None:
        """Forget everything: a new evaluation begins."""
        self.results.clear()

    @abstractmethod
    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """The metrics by name, from the results of all ranks; called on the main process."""

    def evaluate(self, size: int | None = None) -> dict[str, Any]:
        """The metrics, on every rank. A collective.

        Args:
            size: of the data set. Further results are padding, and left out.
        """
        mine = tree_map_only(Tensor, lambda tensor: tensor.cpu(), self.results)
        of_ranks = comm.all_gather(mine)
        results = [*chain.from_iterable(of_ranks)][:size]
        metrics = on_main_process(lambda: self.compute_metrics(results))
        self.results.clear()
        if self.prefix:
            return {f"{self.prefix}/{name}": value for name, value in metrics.items()}
        return metrics
