"""What the ranks print: read, kept whole line by line, marked, and written out or kept in files."""
