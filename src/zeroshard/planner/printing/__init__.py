"""``zeroshard plan``: the command, and the tables and pictures of a plan."""
