"""Model packages: what an export writes, a registry keeps, and serving reads. Nothing here imports torch.

A package is a directory, written once and named by its digest, the SHA-256 of its manifest::

    manifest.json         inputs, outputs, labels, metrics, provenance; SHA-256 and size of each file
    weights.safetensors   the model's state
    program.pt2           what ``torch.export`` wrote: runs without the task's code, and may run code
    model.onnx            the same for onnxruntime: needs no torch, and runs no code
    README.md             the model card

``manifest`` says what a package holds, ``package`` opens and verifies one, ``registry`` keeps them under
names and tags, ``trust`` remembers whose programs may run.
"""
