"""Who this process is, how it meets its peers, and how gradients are summed between them."""
