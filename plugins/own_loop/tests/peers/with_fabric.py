import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build_data(number, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(number, 1, 12, 12, generator=generator)
    return TensorDataset(images, (images.mean(dim=(1, 2, 3)) > 0).long())


fabric = Fabric()
fabric.launch()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * 16)
train_data, test_data = build_data(512, seed=1), build_data(200, seed=2)
loader = DataLoader(train_data, batch_size=32, shuffle=True, drop_last=True)
model, optimizer = fabric.setup(model, optimizer)
loader, test_loader = fabric.setup_dataloaders(loader, DataLoader(test_data, batch_size=100))
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epochs_done": 0}
if os.path.exists("last.pt"):
    fabric.load("last.pt", state)


def evaluate():
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test_loader:
            right += (model(images).argmax(1) == labels).sum()
    model.train()
    return fabric.all_reduce(right, reduce_op="sum").item() / len(test_data)


for epoch in range(state["epochs_done"], 3):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        scheduler.step()
    fabric.print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {evaluate():.3f}")
    state["epochs_done"] = epoch + 1
    fabric.save("last.pt", state)
