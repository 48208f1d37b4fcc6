"""``--on submitit`` and ``paceline.submit``: jobs through Meta's submitit, on Slurm or on this machine.

submitit carries functions, arguments and results as pickles, and loading a pickle runs what is in it. So they
are kept in a folder that nobody but their owner can write or read; see :mod:`.folder`. Nothing of Paceline's
own state goes that way: what is pickled for a task is its command line, and its result is read from the
run's ``result.json``.
"""
