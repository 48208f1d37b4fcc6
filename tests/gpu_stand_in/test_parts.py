"""Parts of a step and of a save on pretended GPUs: the values of the CPU, and the waits that they need."""

from __future__ import annotations

from typing import Any

from tests.gpu_stand_in.fixture import GpuStandIn, run_program


def test_the_parts_have_the_values_of_the_cpu(run_processes: Any, gpu_stand_in: GpuStandIn) -> None:
    (done,) = run_program(
        run_processes,
        gpu_stand_in,
        """
        import copy
        from types import SimpleNamespace
        from torch import nn
        from torch.utils.data import TensorDataset
        from paceline.data.samples import TensorGather
        from paceline.parallel.grad_buffers import FlatLayout, MicrobatchBuffers
        from paceline.parallel.reducer import are_finite
        from paceline.runs import checkpoint_state

        here = torch.device("cuda", 0)

        # Gradients begin where torch would allocate them; one without elements is on the device too.
        parameters = [torch.ones(n, device=here, dtype=d) for n, d in ((3, torch.float32), (0, torch.float32),
                      (5, torch.complex64), (7, torch.float16), (1, torch.float32))]
        layout = FlatLayout(parameters, [], [], torch.zeros(0, dtype=torch.int64))
        flat = {dtype: torch.zeros(n, dtype=dtype, device=here) for dtype, n in layout.flat_buffers.items()}
        for parameter, gradient in zip(parameters, layout.gradient_views(flat)):
            check(gradient.device == here and gradient.dtype == parameter.dtype, gradient)
            check(gradient.data_ptr() % 512 == 0 or not gradient.numel(), gradient)
        on_cpu = FlatLayout([p.cpu() for p in parameters], [], [], torch.zeros(0, dtype=torch.int64))
        check(on_cpu.flat_buffers == {torch.float32: 15, torch.float16: 7}, on_cpu.flat_buffers)

        # Module buffers over three micro-batches.
        class Holder(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mask", torch.tensor([-torch.inf, 0.1, -0.0]))
                self.register_buffer("halves", torch.full((2, 2), 2000.0, dtype=torch.float16))
                self.register_buffer("doubles", torch.full((3,), 0.1, dtype=torch.float64))
                self.register_buffer("turning", torch.tensor([1 + 2j, 3j], dtype=torch.complex64))
                self.register_buffer("none", torch.zeros(0))
                self.register_buffer("count", torch.tensor(4))
                self.register_buffer("seen", torch.tensor([True, False]))

            def forward(self, k):
                self.halves += k
                self.doubles = self.doubles * (1.0 + k)
                self.turning *= 1j ** k
                self.count += 1
                self.seen.fill_(True)

        def step(module):
            buffers = MicrobatchBuffers(module)
            layout = FlatLayout([], buffers.floats, buffers.integers, buffers.counts)
            device = module.mask.device
            flat = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in layout.flat_buffers.items()}
            sums = layout.buffer_sums(flat)
            waits()
            for _ in range(2):
                for tensor in flat.values():
                    tensor.zero_()
                buffers.begin()
                for k in range(3):
                    module(k)
                    buffers.add_to(sums, 2 + k, reset=k < 2)
                buffers.assign(sums, 9.0)
            return waits()

        expected, module = Holder(), Holder().to(here)
        step(expected)
        waited = step(module)
        check(waited == 0, f"buffers need no wait, but {waited}")
        for (name, buffer), value in zip(module.named_buffers(), expected.buffers()):
            same = checkpoint_state.bytes_of(buffer) == checkpoint_state.bytes_of(value)
            check(same, (name, buffer.cpu(), value))

        # Whether gradients are finite.
        values = [torch.ones(3, device=here), torch.full((9,), 60000.0, device=here, dtype=torch.float16)]
        waits()
        check(are_finite(values) and waits() == 1, "one wait")
        check(not are_finite([*values, torch.tensor([torch.nan], device=here)]), "NaN")
        check(not are_finite([torch.tensor([torch.inf], device=here)]), "infinity")

        # A snapshot goes through small pieces of page-locked memory.
        state = {
            "wide": torch.randn(40, 3, dtype=torch.float64), "image": torch.randn(2, 3, 4, 5),
            "conjugate": torch.randn(7, dtype=torch.complex64).conj(), "bytes": torch.arange(250).to(torch.uint8),
            "flags": torch.tensor([True, False, True]), "number": torch.tensor(3.0), "none": torch.zeros(0, 2),
            "half": torch.randn(11).bfloat16(),
        }
        state["image"] = state["image"].to(memory_format=torch.channels_last)
        on_gpu = {name: tensor.to(here) for name, tensor in state.items()} | {"number": state["number"]}
        checkpoint_state._CHUNK_BYTES = 100
        expected, snapshot = checkpoint_state.Snapshot(), checkpoint_state.Snapshot()
        expected.capture({"a": state, "b": {"x": torch.ones(3)}})
        for _ in range(2):
            waits()
            snapshot.capture({"a": on_gpu, "b": {"x": torch.ones(3, device=here)}})
            waited, chunks = waits(), sum(tensor.nbytes for tensor in state.values()) // 100
            check(chunks <= waited <= 2 * chunks, (waited, chunks))
            for name, tensors in snapshot.files.items():
                contents = [[*map(bytes, checkpoint_state.file_contents(t))] for t in (tensors, expected.files[name])]
                check(contents[0] == contents[1], name)

        # Data that do not fit the GPU are gathered into page-locked memory.
        torch.cuda.mem_get_info = lambda device: (0, 0)
        dataset = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
        gather = TensorGather(dataset, device=here, index_map=None)
        waits()
        import numpy as np
        taken = gather.take(gather.locate(np.array([4, 0, 1])))
        check(waits() == 0, "gathering needs no wait")
        check(taken[0].tolist() == [[8, 9], [0, 1], [2, 3]] and taken[1].tolist() == [4, 0, 1], taken)
        """,
    )
    assert done.returncode == 0, done.stderr


def test_processes_that_share_a_gpu_share_its_memory(run_processes: Any, gpu_stand_in: GpuStandIn) -> None:
    for done in run_program(
        run_processes,
        gpu_stand_in,
        """
        from types import SimpleNamespace
        from paceline.core.environment import detect_environment
        from paceline.parallel.world import choose_device
        from paceline.parallel.world import open_world
        from paceline.training.session import ElasticGroups, FixedGroup

        whole = torch.cuda.get_device_properties(0).total_memory
        with open_world(detect_environment(), device="cuda", backend="gloo") as world:
            check(FixedGroup(world).memory_per_process() == whole // 2, "three processes, two GPUs")

        def under_agent(processes):
            local = choose_device("cuda", "gloo", local_rank=world.rank)
            groups = ElasticGroups(SimpleNamespace(), local=local, processes=processes, world_size=processes,
                                   comm_debug=False, on_rank_0=lambda: None)
            return groups.memory_per_process()

        check([under_agent(n) for n in (1, 2, 3, 5)] == [whole, whole, whole // 2, whole // 3], "an agent's processes")
        """,
        ranks=3,
    ):
        assert done.returncode == 0, done.stderr
