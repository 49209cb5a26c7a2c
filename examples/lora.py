"""Low-rank adapters (LoRA) by PEFT: the model's own weights are frozen, and the adapter alone is kept.

Checkpoints of the run, ``trained.weights`` and ``evener export`` hold the whole model. PEFT takes the adapter out of
these weights, and writes it in its own form, which ``PeftModel.from_pretrained`` reads.

    pip install peft transformers
    python examples/lora.py
"""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import evener
from evener.integrations.hf_outputs import logits, token_loss

VOCABULARY, LENGTH = 16, 12


def base() -> GPT2LMHeadModel:
    """A model that is not trained, the same at each call; in place of one from ``from_pretrained``."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config)


def model() -> nn.Module:
    lora = LoraConfig(r=8, lora_alpha=64, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(base(), lora)


def counting() -> list[dict[str, Tensor]]:
    rows = [torch.arange(start, start + LENGTH) % VOCABULARY for start in range(VOCABULARY)]
    return [{"input_ids": row, "labels": row} for row in rows * 12]


def task() -> evener.Task:
    return evener.Task(
        name="lora",
        model=model,
        forward=logits,
        loss=token_loss(causal=True),
        optimizer=lambda parameters: torch.optim.AdamW(
            [parameter for parameter in parameters if parameter.requires_grad], lr=5e-3
        ),
        train=counting(),
        batch_size=16,
        epochs=12,
    )


if __name__ == "__main__":
    trained = evener.fit(task, processes=2)
    network = model()
    network.load_state_dict(trained.weights)
    network.save_pretrained("adapter")  # the adapter alone: adapter_model.safetensors, adapter_config.json

    adapter = get_peft_model_state_dict(network)
    kept, whole = (sum(value.numel() for value in part.values()) for part in (adapter, trained.weights))
    print(f"last loss {trained.summary.final_loss:.3f}; {kept} of {whole} numbers are the adapter's")
    words = torch.arange(LENGTH)[None]
    again = PeftModel.from_pretrained(base(), "adapter")
    with torch.no_grad():
        same = torch.equal(again.eval()(words).logits, network.eval()(words).logits)
    print(f"base and adapter, read again, give the same outputs: {same}")
