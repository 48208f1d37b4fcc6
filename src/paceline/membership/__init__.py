"""Who belongs to a run now: generations, views, and the hand-over of state to who joins."""
