"""How the ranks of a job meet, wait for one another, and part."""

from paceline.rendezvous.meet import Method, meet, parse_method
from paceline.rendezvous.meeting import Meeting
from paceline.rendezvous.peers import Peer

__all__ = ["Meeting", "Method", "Peer", "meet", "parse_method"]
