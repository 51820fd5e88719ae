"""Reinforcement learning without a loader: a policy gradient (REINFORCE) balances a pole.

pip install gymnasium
"""

import gymnasium
import torch
from torch import nn
from torch.distributions import Categorical

from hooktrain import Checkpointer, SimpleTrainer, build_strategy, default_hooks, launch


class Policy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


class Reinforce(SimpleTrainer):
    def compute_loss(self, data):  # data is None
        # An episode is a function of the iteration, so a resumed run plays the same one.
        state, _ = self.env.reset(seed=self.iter)
        log_probs, rewards, is_over = [], [], False
        while not is_over:
            policy = Categorical(logits=self.model(torch.as_tensor(state)))
            action = policy.sample()
            log_probs.append(policy.log_prob(action))
            state, reward, failed, timed_out, _ = self.env.step(action.item())
            rewards.append(reward)
            is_over = failed or timed_out
        self.storage.put_scalar("reward", sum(rewards))
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        return -(torch.stack(log_probs) * advantages).mean()


def main():
    model = build_strategy(seed=0, device="cpu").prepare(Policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = Reinforce(model, None, optimizer)
    trainer.env = gymnasium.make("CartPole-v1")
    saver = Checkpointer(model, "output/reinforcement", trainer=trainer)
    trainer.register_hooks(default_hooks(checkpointer=saver, checkpoint_period=50))
    saver.resume_or_load()
    trainer.train(max_iter=200)
    print(
        f"mean reward of the last episodes: {trainer.storage.history('reward').avg(20)}"
    )


if __name__ == "__main__":
    launch(main)
