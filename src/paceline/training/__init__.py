"""The loop, and what it is made of: the plan, the state, one step, evaluation, control."""
