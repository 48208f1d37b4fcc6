"""Programs that submit functions; the tests write them into their directories and run them there."""

ADD = """
import os, sys
import paceline

def add(a, b):
    print("adding", a, b)
    return a + b

def place():
    return [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK")]

def gathered():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, place())
    dist.destroy_process_group()
    return ranks

if __name__ == "__main__":
    on = sys.argv[1]
    one = paceline.submit(add, 5, 7, on=on, folder="log_test")
    three = paceline.submit(add, 5, 7, on=on, folder="log_test", nproc=3)
    jobs = paceline.submit_array(add, [1, 2], [3, 4], on=on, name="sums")
    # The same folder may be used again; the numbers of the jobs tell their files apart.
    print(one.result(), three.results(), [job.result() for job in jobs])
    print(one.id, one.status().state, repr(one.stdout().splitlines()[2]))
"""

NETWORK = '''
"""A callable network that spawns its workers, in the program that submits it."""

import torch, torch.distributed as dist, torch.multiprocessing as mp
import paceline

def worker(rank, network, url, sums):
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    total = torch.tensor([float(network.size + rank)])
    dist.all_reduce(total)
    sums[rank] = total[0]
    dist.destroy_process_group()

class Network:
    def __init__(self, size):
        self.size = size

    def __call__(self):
        import os, submitit
        sums = torch.zeros(2).share_memory_()
        mp.spawn(worker, (self, f"file://{os.getcwd()}/meeting", sums), nprocs=2)
        return submitit.JobEnvironment().num_tasks, sums.tolist()

if __name__ == "__main__":
    print(paceline.submit(Network(5), on="local").result())
'''

COUNT = """
import os, signal, sys, submitit
import paceline

class Count:
    def __init__(self, at=0, starts=1):
        self.at, self.starts = at, starts

    def __call__(self, until, stop_at):
        while self.at < until:
            self.at += 1
            if self.at == stop_at:
                os.kill(os.getpid(), signal.SIGUSR2)  # as Slurm does before the time limit
        return self.at, self.starts

    def checkpoint(self, until, stop_at):
        return Count(self.at, self.starts + 1)

class Ends(Count):
    def checkpoint(self, until, stop_at):
        return None

def fails():
    raise ValueError("no such thing")

if __name__ == "__main__":
    print(paceline.submit(Count(), 10, 6, on="local").result())
    ends = paceline.submit(Ends(), 10, 6, on="local")
    failing = paceline.submit(fails, on="local")
    for job in (ends, failing):
        try:
            print(job.result())
        except paceline.LaunchError as error:
            print(str(error).splitlines()[-6:], job.status().state)
"""
