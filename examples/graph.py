"""A graph network that distinguishes trees from graphs with a cycle.

pip install torch_geometric
"""

import torch
from torch import nn
from torch.utils.data import Dataset
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_add_pool

from hooktrain import Checkpointer, MetricEvaluator, SimpleTrainer, build_strategy
from hooktrain import build_test_loader, build_train_loader, default_hooks
from hooktrain import inference_on_dataset, launch


class Graphs(Dataset):
    """Random trees of 8 to 15 nodes, half of which have an extra edge that closes a cycle."""

    def __init__(self, first, count):
        self.seeds = range(first, first + count)

    def __len__(self):
        return len(self.seeds)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seeds[index])
        size = 8 + index % 8
        ends = [int(torch.randint(i, (), generator=generator)) for i in range(1, size)]
        edges = [*enumerate(ends, 1)] + [(0, size - 1)] * (index % 2)
        both = torch.tensor(edges + [(b, a) for a, b in edges]).T
        return Data(x=torch.ones(size, 1), edge_index=both, y=torch.tensor([index % 2]))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (1, 32), (32, 32), (32, 32)
        self.layers = nn.ModuleList(GINConv(nn.Linear(*size)) for size in sizes)
        self.head = nn.Linear(32, 2)

    def forward(self, batch):
        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edge_index).relu()
        logits = self.head(global_add_pool(x, batch.batch))
        return nn.functional.cross_entropy(logits, batch.y) if self.training else logits


def accuracy(logits, labels):
    return (logits.argmax(1) == labels).double().mean()


def main():
    model = build_strategy(seed=0).prepare(Net)
    options = {"collate_fn": Batch.from_data_list}
    loader = build_train_loader(Graphs(0, 512), total_batch_size=32, **options)
    test_loader = build_test_loader(Graphs(10_000, 128), batch_size=64, **options)
    metric = MetricEvaluator(accuracy, target_key="y")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    trainer = SimpleTrainer(model, loader, optimizer)
    saver = Checkpointer(model, "output/graph", trainer=trainer)
    usual = default_hooks(
        checkpointer=saver,
        checkpoint_period="1 epoch",
        eval_function=lambda: inference_on_dataset(model, test_loader, metric),
        eval_period="5 epochs",
    )
    trainer.register_hooks(usual)
    saver.resume_or_load()
    trainer.train(max_epochs=20)


if __name__ == "__main__":
    launch(main)
