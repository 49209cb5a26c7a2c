"""A classifier of padded sentences, in the manner of Hugging Face: dictionaries, accumulation, warm-up by step."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import evener

LONGEST = 5


class Outputs(dict):
    __getattr__ = dict.__getitem__


class Classifier(nn.Module):
    def __init__(self, words=13, width=6, kinds=3):
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width, padding_idx=0), nn.Linear(width, kinds)

    def forward(self, input_ids, attention_mask, labels=None):
        mask = attention_mask.unsqueeze(-1)
        logits = self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Outputs(loss=loss, logits=logits)


def sentences(count, seed):
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=drawn)
    return [
        {"ids": torch.randint(1, 13, (int(length),), generator=drawn).tolist(), "label": int(length) % 3}
        for length in lengths
    ]


def collate(items):
    longest = max(len(item["ids"]) for item in items)
    ids = torch.tensor([item["ids"] + [0] * (longest - len(item["ids"])) for item in items])
    labels = torch.tensor([item["label"] for item in items])
    return {"input_ids": ids, "attention_mask": (ids != 0).double(), "labels": labels}


def main():
    told = []
    train_dataloader = DataLoader(sentences(41, 1), batch_size=6, shuffle=True, collate_fn=collate)
    eval_dataloader = DataLoader(sentences(17, 2), batch_size=6, collate_fn=collate)
    model = Classifier().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    lr_scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    accumulate = 2
    model, optimizer, train_dataloader, eval_dataloader = evener.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for _epoch in range(3):
        model.train()
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = evener.global_mean(outputs.loss) / accumulate
            loss.backward()
            if (step + 1) % accumulate == 0 or step + 1 == len(train_dataloader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            told.append(loss.item())
        model.eval()
        right, seen = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = evener.gather((outputs.logits.argmax(dim=-1), batch["labels"]))
            right += (predictions == references).sum().item()
            seen += len(references)
        told.append(right / seen)
    return model.state_dict(), told
