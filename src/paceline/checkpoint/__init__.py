"""Checkpoints that are committed whole, and believed only after they are checked.

A checkpoint is a directory, written once::

    checkpoints/
      step-00000050-v00000051/
        model.safetensors        one file for each part of the state that holds tensors
        optimizers.safetensors
        state.json               everything that is no tensor, and where the tensors go
        manifest.json            written last: SHA-256 and size of each file, and of itself
      LATEST                     a link to the newest one: a hint for people, not believed

``state`` turns nested state into named tensors and JSON, ``tensors`` lays them out as safetensors,
``manifest`` says what must be there, ``storage`` commits and finds, ``checkpointer`` does it in the
background.
"""
