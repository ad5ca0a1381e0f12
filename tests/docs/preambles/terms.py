import paceline
