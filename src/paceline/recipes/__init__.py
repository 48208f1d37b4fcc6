"""Tasks that come with Paceline, by name: see ``paceline.task.RECIPES``."""
