"""A stand-in for torchvision, as far as the scripts use it: random images, one small network, transforms that do little."""

from torchvision import datasets, models, transforms
