"""One life of the ranks on this host: born, heard, ended."""
