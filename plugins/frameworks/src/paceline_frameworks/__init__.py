"""Launchers and strategies of other frameworks."""
