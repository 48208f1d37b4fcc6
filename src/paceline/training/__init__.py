"""The loop, and what it is made of: the plan, the state, one step, evaluation, control.

To read it, begin with :mod:`paceline.worker`, which every launcher starts. ``session`` takes a run from
what was asked for to its result; ``trainer`` is the loop, and its ``_step`` one step from the data to the
ledger; ``step`` is what one shard computes in it, and :mod:`paceline.strategies` how that is split over
ranks. The rest, by subject:

- before the first step: ``preparation``, ``plan``, ``automatic``, ``pins``, ``run``, ``initialisation``,
  ``parent``, ``patterns``, ``restoring``, ``selection``, ``rehearsal``;
- what changes: ``state``, ``replica``, ``average``, ``scaler``, ``rates``, ``adapters``, ``randomness``,
  ``activation_checkpointing``;
- when something is due: ``schedule``, ``rounds``, ``lookahead``, ``deadline``, ``clocks``;
- evaluation: ``evaluation``, ``validation``, ``whole_metrics``, ``judge``, ``referee``, ``trained``,
  ``conclusion``, ``drift``;
- stopping, saving, doubting: ``control``, ``stopping``, ``saving``, ``checkpointing``, ``non_finite``,
  ``verification``;
- ranks that come and go: ``members``, ``participant``, ``balance``;
- ranks that do not share each step: ``together``, ``outer``, ``stretches``, ``hogwild``, ``servers``,
  ``arrivals``; and what they must come to: ``simulation``, ``pipedream_simulation``.
"""
