"""Fine-tuning by adapters (LoRA): checkpoints have only the adapters, not the large model.

pip install peft transformers
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from hooktrain import Checkpointer, SimpleTrainer, WarmupParamScheduler, build_strategy
from hooktrain import CosineParamScheduler, build_train_loader, default_hooks, launch

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 32, "vocab_size": 50}
WORD = torch.arange(50)  # the task: each word is followed by the word 7 places further


def leave_out_frozen(model):
    """Leave the frozen parameters out of checkpoints; docs/guide/fine-tuning.md says when."""
    named = model.named_parameters(remove_duplicate=False)
    frozen = [name for name, parameter in named if not parameter.requires_grad]

    def leave_out(model, state, prefix, metadata):
        for name in frozen:
            del state[prefix + name]

    model.register_state_dict_post_hook(leave_out)


class Sentences(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = (WORD[index % 50] + 7 * torch.arange(32)) % 50
        return {"input_ids": tokens, "labels": tokens}


def small_gpt_with_adapters():
    # In practice use GPT2LMHeadModel.from_pretrained(...), which loads the weights at each start.
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **SIZES))
    layers = ["c_attn", "c_fc", "c_proj"]
    adapters = LoraConfig(r=8, target_modules=layers, fan_in_fan_out=True)
    adapted = get_peft_model(model, adapters)
    leave_out_frozen(adapted)
    return adapted


class Adapting(SimpleTrainer):
    def compute_loss(self, data):
        return self.model(**data).loss  # peft's forward takes any arguments


def main():
    model = build_strategy(seed=0).prepare(small_gpt_with_adapters).train()
    loader = build_train_loader(Sentences(), total_batch_size=32)
    trained = [p for p in model.parameters() if p.requires_grad]
    trainer = Adapting(model, loader, torch.optim.AdamW(trained, lr=1e-2))
    folder = "output/lora"
    saver = Checkpointer(model, folder, trainer=trainer)
    usual = default_hooks(
        checkpointer=saver,
        checkpoint_period=100,
        scheduler=WarmupParamScheduler(CosineParamScheduler(1.0, 0.0), 0.01, 0.1),
    )
    trainer.register_hooks(usual)
    saver.resume_or_load()
    trainer.train(max_iter=200)


if __name__ == "__main__":
    launch(main)
