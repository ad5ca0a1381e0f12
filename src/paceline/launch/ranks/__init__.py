"""What runs in a rank before the user's first line, and after the last: it makes a fork ``python script.py``."""
