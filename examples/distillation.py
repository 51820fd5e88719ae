"""Distillation: a small network learns from the outputs of a larger one (arXiv:1503.02531)."""

import torch
from torch import nn
from torch.nn import functional as F

from hooktrain import Checkpointer, MetricEvaluator, SimpleTrainer, build_strategy
from hooktrain import build_test_loader, build_train_loader, default_hooks
from hooktrain import inference_on_dataset, launch
from hooktrain.demos import DigitsCNN, DigitsDataset, RandomShift

TEMPERATURE = 3.0


def accuracy(logits, labels):
    return (logits.argmax(1) == labels).double().mean()


class Distillation(SimpleTrainer):
    teacher = None  # not in a module, so it is neither trained nor saved

    def compute_loss(self, data):
        with torch.no_grad():
            soft = F.softmax(self.teacher(data) / TEMPERATURE, 1)
        logits = self.model(data["image"])
        learned = F.log_softmax(logits / TEMPERATURE, 1)
        soft_loss = F.kl_div(learned, soft, reduction="batchmean") * TEMPERATURE**2
        hard_loss = F.cross_entropy(logits, data["label"])
        return {"loss_soft": 0.9 * soft_loss, "loss_hard": 0.1 * hard_loss}


def of_image(student, batch):
    return student(batch["image"])


def run(trainer, folder, **options):
    test_loader = build_test_loader(DigitsDataset(train=False), batch_size=120)
    metric = MetricEvaluator(accuracy, target_key="label")
    model = trainer.model
    saver = Checkpointer(model, folder, trainer=trainer)
    usual = default_hooks(
        checkpointer=saver,
        checkpoint_period="5 epochs",
        eval_function=lambda: inference_on_dataset(
            model, test_loader, metric, **options
        ),
    )
    trainer.register_hooks(usual)
    saver.resume_or_load()
    trainer.train(max_epochs=10)


def main():
    data = DigitsDataset(train=True, transform=RandomShift())
    loader = build_train_loader(data, total_batch_size=64)
    teacher = build_strategy(seed=0).prepare(DigitsCNN)
    adam = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    run(SimpleTrainer(teacher, loader, adam), "output/distillation/teacher")
    layers = nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)
    student = build_strategy(seed=1).prepare(lambda: nn.Sequential(*layers))
    loader = build_train_loader(data, total_batch_size=64)
    adam = torch.optim.Adam(student.parameters(), lr=1e-2)
    trainer = Distillation(student, loader, adam)
    trainer.teacher = teacher.eval()
    run(trainer, "output/distillation/student", step=of_image)


if __name__ == "__main__":
    launch(main)
