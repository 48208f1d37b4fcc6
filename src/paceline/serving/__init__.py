"""Serving: packages behind the Open Inference Protocol v2, on one machine.

``server`` holds the process together; ``app`` speaks HTTP, ``infer_request`` and ``infer_response`` the
protocol; ``batching`` decides which requests go to which replica, ``deployment`` keeps these alive;
``replica`` is the program of one, the only part that imports torch. ``prediction`` and ``chunks`` are for
large files, ``client`` for any server that speaks the protocol.
"""
