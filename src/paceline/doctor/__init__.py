"""The doctor: looks at every machine of a job, and at all that is between them, before the job runs.

A small program (:mod:`paceline.doctor.node`) runs once on each machine, started by the job's own launcher.
They meet on machine 0, which asks the others for facts, has them test the way to each other, and judges.
It needs no torch: a machine whose torch is missing or broken is what it is to find.
"""
