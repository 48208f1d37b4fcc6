import random


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class RandomChoice(Compose):
    def __call__(self, *inputs):
        return random.choice(self.transforms)(*inputs)


def Normalize(mean, std):
    return lambda image: (image - mean[0]) / std[0]


def _keep(*args, **options):
    return lambda image: image


ToTensor = PILToTensor = ConvertImageDtype = RandomResizedCrop = RandomHorizontalFlip = Resize = CenterCrop = _keep
