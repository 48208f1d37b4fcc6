"""``paceline bench comm``: how fast collectives are, and whether their results are right.

Time and bandwidths are what NVIDIA's nccl-tests report, by the formulas of its ``doc/PERFORMANCE.md``: the
*algorithm bandwidth* is size over time; the *bus bandwidth* is that times a factor, so that it can be
compared with what the hardware is able to do, whatever the number of ranks.
"""
