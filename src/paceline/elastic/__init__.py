"""Recovery: an agent on each node runs the loop, the job's leader decides, a node's workers obey.

- :class:`paceline.elastic.agent.Agent`: the loop of one node's process. It owns the other two.
- :class:`paceline.elastic.leader.JobLeader`: decides for all workers, by what
  :class:`paceline.elastic.group_planner.GroupPlanner` and :class:`paceline.elastic.failure_policy.FailurePolicy` say.
- :class:`paceline.elastic.node.NodeWorkers`: starts, watches and kills the workers of a node, as ordered.

A worker's side is :class:`paceline.elastic.worker_channel.AgentClient` and :mod:`paceline.elastic.group_formation`.
Several nodes have an agent each, and agree on their leader in :mod:`paceline.elastic.consensus`.
"""
