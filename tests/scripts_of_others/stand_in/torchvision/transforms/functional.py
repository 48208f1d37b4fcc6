from enum import Enum


class InterpolationMode(Enum):
    BILINEAR = "bilinear"


def get_dimensions(images):
    return images.shape[-3:]
