import torch
from torch import nn


def get_model(name, weights, num_classes):
    torch.manual_seed(0)  # in the place of weights to load
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, num_classes),
    )
