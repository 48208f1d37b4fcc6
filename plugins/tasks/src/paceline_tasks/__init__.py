"""The tasks that come with Paceline, which `paceline.core.built_in.BUILT_IN` names."""
