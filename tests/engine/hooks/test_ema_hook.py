import torch

from hooktrain.engine import SimpleTrainer
from hooktrain.engine.hooks import EMA
from toy import linear_trainer


def test_the_average_follows_the_weights_and_the_model_keeps_the_raw_ones() -> None:
    plain, trainer = linear_trainer(), linear_trainer()
    ema = EMA(trainer.model, decay=0.5, warmup=False)
    start = trainer.model.fc.weight.detach().clone()
    trainer.register_hooks([ema])
    trainer.train(0, 1)
    plain.train(0, 1)
    raw = trainer.model.fc.weight
    assert torch.equal(raw, plain.model.fc.weight)
    torch.testing.assert_close(ema.average.module.fc.weight, 0.5 * start + 0.5 * raw)


def test_the_average_and_its_counter_resume_exactly() -> None:
    def make() -> tuple[EMA, SimpleTrainer]:
        trainer = linear_trainer()
        hook = EMA(trainer.model)
        trainer.register_hooks([hook])
        return hook, trainer

    whole, whole_trainer = make()
    whole_trainer.train(0, 4)
    _, first_trainer = make()
    first_trainer.train(0, 4)
    second, second_trainer = make()
    second_trainer.model.load_state_dict(first_trainer.model.state_dict())
    second_trainer.load_state_dict(first_trainer.state_dict())
    second_trainer.train(max_iter=8)
    whole_trainer.train(max_iter=8)
    assert torch.equal(second.average.module.fc.weight, whole.average.module.fc.weight)


def test_swap_shows_the_average_inside_and_the_exact_raw_weights_afterwards() -> None:
    trainer = linear_trainer()
    ema = EMA(trainer.model)
    trainer.register_hooks([ema])
    trainer.train(0, 3)
    raw = trainer.model.fc.weight.detach().clone()
    with ema.swap():
        assert torch.equal(trainer.model.fc.weight, ema.average.module.fc.weight)
    assert torch.equal(trainer.model.fc.weight, raw)
