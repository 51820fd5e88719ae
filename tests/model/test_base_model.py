from typing import Any

import pytest
import torch
from model_toys import ToyModel, batch, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hooktrain.engine import StepTrainer
from hooktrain.model import BaseDataPreprocessor, BaseModel, ImgDataPreprocessor


class GuideModel(BaseModel):
    """The model of MMEngine's migration guide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, img: Tensor, label: Tensor, mode: str) -> Any:  # type: ignore[override]
        feat = self.linear(img)
        if mode == "loss":
            return {"loss1": (feat - label).pow(2), "loss2": (feat - label).abs()}
        if mode == "predict":
            return [_feat for _feat in feat]  # noqa: C416
        return None


def test_the_model_of_the_guide_learns_in_a_trainer() -> None:
    dataset = [(torch.ones(1, 1), torch.ones(1, 1))] * 50
    model = GuideModel()
    loader = DataLoader(dataset, batch_size=2)
    trainer = StepTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.01))
    first = model.train_step(next(iter(loader)), sgd(model))
    trainer.train(0, 100)
    assert list(first) == ["loss", "loss1", "loss2"]
    (predicted, _) = model.val_step(next(iter(loader)))
    assert predicted.item() == pytest.approx(1.0, abs=0.02)
    last = trainer.storage.latest()["loss"][0]
    assert last < 0.05 * first["loss"].item()


def test_without_a_preprocessor_there_is_the_base_one() -> None:
    assert type(ToyModel().data_preprocessor) is BaseDataPreprocessor


def test_a_preprocessor_is_built_from_a_dict_that_stays_as_it_is() -> None:
    cfg = {"type": "ImgDataPreprocessor", "mean": [0.5], "std": [2.0]}
    preprocessor = ToyModel(cfg).data_preprocessor
    assert type(preprocessor) is ImgDataPreprocessor
    assert preprocessor.mean.flatten().tolist() == [0.5]
    assert cfg == {"type": "ImgDataPreprocessor", "mean": [0.5], "std": [2.0]}


def test_a_module_is_used_as_it_is_and_trained_with_the_model() -> None:
    preprocessor = nn.Linear(1, 1)
    model = ToyModel(preprocessor)
    assert model.data_preprocessor is preprocessor
    assert "data_preprocessor.weight" in dict(model.named_parameters())


@pytest.mark.parametrize("wrong", [3, "ImgDataPreprocessor", ImgDataPreprocessor, [1]])
def test_another_preprocessor_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="data_preprocessor must be a module, a dict"):
        ToyModel(wrong)


def test_a_model_without_forward_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseModel()  # type: ignore[abstract]


def test_steps_of_validation_and_test_predict_and_leave_the_mode_alone() -> None:
    model = ToyModel()
    img, label = batch(3)
    for step in (model.val_step, model.test_step):
        predicted = step((img, label))
        assert torch.equal(torch.stack(predicted), model.linear(img))
        assert model.training


def test_a_subclass_may_weigh_its_losses_by_its_own_parse_losses() -> None:
    class Weighted(ToyModel):
        def parse_losses(self, losses: Any) -> Any:
            return super().parse_losses({"loss1": losses["loss1"] * 0, "loss2": losses["loss2"]})

    model = Weighted()
    log_vars = model.train_step(batch(2), sgd(model))
    assert log_vars["loss1"].item() == 0.0
    assert torch.equal(log_vars["loss"], log_vars["loss2"])
    assert log_vars["loss2"].item() > 0


def test_the_preprocessor_goes_where_the_model_goes() -> None:
    model = ToyModel({"type": "ImgDataPreprocessor", "mean": [0.5], "std": [2.0]})
    assert model.data_preprocessor.device == torch.device("cpu")
    assert model.to("meta") is model
    assert model.data_preprocessor.device == torch.device("meta")
    assert model.data_preprocessor.mean.device == torch.device("meta")
    moved = model.data_preprocessor({"inputs": torch.ones(1, 1, 2, 2)})
    assert moved["inputs"].is_meta
    model.to_empty(device="cpu")
    assert model.data_preprocessor.device == torch.device("cpu")
    assert model.data_preprocessor.mean.flatten().tolist() == [0.5]


def test_the_preprocessor_follows_a_change_of_type_and_place_at_once() -> None:
    model = ToyModel()
    model.to("meta", torch.float64)
    assert model.data_preprocessor.device == torch.device("meta")
    model.half()
    assert model.data_preprocessor.device == torch.device("meta")


def test_a_preprocessor_has_no_state_and_nothing_to_broadcast() -> None:
    model = ToyModel({"type": "ImgDataPreprocessor", "mean": [0.5], "std": [2.0]})
    assert set(model.state_dict()) == {"linear.weight", "linear.bias"}
    assert list(model.buffers()) == []


def test_built_on_another_default_device_it_casts_to_that() -> None:
    with torch.device("meta"):
        model = ToyModel()
    assert model.data_preprocessor.device == torch.device("meta")
