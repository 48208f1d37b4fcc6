"""The tasks that come with Paceline; `paceline.core.task_loading.RECIPES` names them."""
