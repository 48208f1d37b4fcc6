"""What the pages of Paceline's servers share: how files are found, their policy, colours and elements."""
