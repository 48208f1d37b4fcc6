import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_data(number, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(number, 1, 12, 12, generator=generator)
    return TensorDataset(images, (images.mean(dim=(1, 2, 3)) > 0).long())


accelerator = Accelerator()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * 16)
train_data, test_data = build_data(512, seed=1), build_data(200, seed=2)
loader = DataLoader(train_data, batch_size=32, shuffle=True, drop_last=True)
test_loader = DataLoader(test_data, batch_size=100)
model, optimizer, loader, test_loader, scheduler = accelerator.prepare(model, optimizer, loader, test_loader, scheduler)
epochs_done = 0
if os.path.exists("last/epochs_done"):
    accelerator.load_state("last")
    epochs_done = int(open("last/epochs_done").read())


def evaluate():
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test_loader:
            right += accelerator.gather_for_metrics(model(images).argmax(1) == labels).sum().item()
    model.train()
    return right / len(test_data)


for epoch in range(epochs_done, 3):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {evaluate():.3f}")
    accelerator.save_state("last")
    if accelerator.is_main_process:
        open("last/epochs_done", "w").write(str(epoch + 1))
accelerator.end_training()
