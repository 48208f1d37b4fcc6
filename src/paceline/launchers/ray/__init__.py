"""Jobs on Ray."""
