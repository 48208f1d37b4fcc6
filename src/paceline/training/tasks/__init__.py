"""The tasks that come with Paceline; `paceline.core.task_loading.BUILT_IN_TASKS` names them."""
